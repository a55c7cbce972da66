"""What pyproject.toml cannot say: recipes/ stands at the top and travels as grpo_lab/recipes in a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path(__file__).resolve().parent / "recipes"


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install reads them where they are
            target = Path(self.build_lib) / "grpo_lab" / "recipes"
            shutil.rmtree(target, ignore_errors=True)  # an earlier build may hold recipes that are gone
            shutil.copytree(RECIPES, target)


setup(cmdclass={"build_py": BuildWithRecipes})
