"""A tool in a module that imports nothing: a process of its own has it at once."""


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: first factor
        b: second factor

    Returns:
        The product.
    """
    return a * b
