"""A real LLaVA (CLIP tower, Qwen2 text model) of some thousand weights with its processor, built from code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Config,
)

from grpo_lab.testing import tiny_tokenizer

#: the one that needs no torchvision, under its name of transformers 5.4 or before
PROCESSOR = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIDE, PATCH = 28, 14


def save_tiny_llava(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    eye = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH, projection_dim=16)
    text = Qwen2Config(**sizes, **ends, num_key_value_heads=2, vocab_size=len(tokenizer), initializer_range=0.2)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=eye,
            text_config=text,
            image_token_id=image_id,
            image_token_index=image_id,
            vision_feature_layer=-1,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).float()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 200)]
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=PROCESSOR(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def with_images(models: dict[str, Path], **more: Any) -> dict[str, Any]:
    noise = np.random.RandomState(0)
    pictures = [Image.fromarray(noise.randint(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(8)]
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {i}?"}], "image": picture}
        for i, picture in enumerate(pictures)
    ]
    return {
        "model": LlavaForConditionalGeneration.from_pretrained(models["llava"], dtype=torch.float32),
        "processing_class": LlavaProcessor.from_pretrained(models["llava"]),
        "train_dataset": Dataset.from_list(rows),
        **more,
    }
