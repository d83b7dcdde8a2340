"""Documents into tokens, once: the tokenizer of a run, and the cache of tokenized text on disk.

A tokenizer is always a Hugging Face tokenizer.json: the model's own, 256 bytes and an end token,
or a small BPE trained on the text. Each document's tokens are followed by the end token. The cache
is a folder named by a fingerprint of file contents, document rule and tokenizer, published by
rename.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ridgeline.core import env, progress
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir, atomic_path
from ridgeline.train.config import DataConfig
from ridgeline.train.documents import DocumentRule, file_digest, read_documents

_VERSION = 2
_BATCH_CHARS = 1 << 20
_END = "<|endoftext|>"
# Ends of a pretraining document, before the end of a chat turn that tokenizer_config.json may name.
_END_NAMES = (_END, "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """A tokenizer.json with the id that ends a document."""

    json_text: str
    end_id: int
    vocab_size: int
    extra_files: dict[str, str]
    """Other files of its folder that travel with it (tokenizer_config.json ...), name -> text."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.json_text.encode()).hexdigest()

    def files(self) -> dict[str, str]:
        """What to write to a folder, name -> text."""
        return {"tokenizer.json": self.json_text, **self.extra_files}

    def build(self) -> tokenizers.Tokenizer:
        """The library's object; never cuts or pads, whatever its file says."""
        built = tokenizers.Tokenizer.from_str(self.json_text)
        built.no_truncation()
        built.no_padding()
        return built


def parse_tokenizer(
    json_text: str, where: str, extra_files: dict[str, str] | None = None
) -> TextTokenizer:
    """A tokenizer.json's text as a TextTokenizer.

    Raises: UserError where it is none or names no end token.
    """
    try:
        built = tokenizers.Tokenizer.from_str(json_text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"tokenizer: {where} is not a tokenizer.json: {error}") from error
    extra = extra_files or {}
    names = [*_END_NAMES, *_named_end(extra.get("tokenizer_config.json"))]
    ends = [built.token_to_id(name) for name in names]
    end_id = next((end for end in ends if end is not None), None)
    if end_id is None:
        raise UserError(f"tokenizer: {where} has none of the end tokens {', '.join(names)}")
    size = max(built.get_vocab(with_added_tokens=True).values()) + 1
    return TextTokenizer(json_text=json_text, end_id=end_id, vocab_size=size, extra_files=extra)


def _named_end(config_text: str | None) -> list[str]:
    if not config_text:
        return []
    try:
        named: Any = json.loads(config_text).get("eos_token")
    except (ValueError, AttributeError):
        return []
    named = named.get("content") if isinstance(named, dict) else named
    return [named] if isinstance(named, str) else []


def load_tokenizer(path: Path | str) -> TextTokenizer:
    """A tokenizer.json or its folder from disk.

    Raises: UserError where it is missing or broken.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
        names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
        extra = {
            name: (file.parent / name).read_text(encoding="utf-8")
            for name in names
            if (file.parent / name).is_file()
        }
    except OSError as error:
        raise UserError(
            f"tokenizer: could not read {file}: {error.strerror or error}; use byte or bpe"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"tokenizer: {file} is not UTF-8") from error
    return parse_tokenizer(text, str(file), extra)


def byte_tokenizer() -> TextTokenizer:
    """256 bytes (id = byte) and an end token (256), as a tokenizer.json."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    built = tokenizers.Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(built)


def train_bpe(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE of at most `vocab_size` entries, trained on documents."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(documents, trainer=trainer)
    return _finish(built)


def _finish(built: tokenizers.Tokenizer) -> TextTokenizer:
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([_END])
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    extra = {"tokenizer_config.json": json.dumps(described, indent=2)}
    return parse_tokenizer(built.to_str(), "the built tokenizer", extra)


def cache_folder(config: DataConfig) -> Path:
    """Where tokenized text is kept."""
    return config.cache if config.cache is not None else env.cache_dir() / "tokens"


def choose_tokenizer(config: DataConfig, model_folder: Path | None) -> TextTokenizer:
    """The tokenizer that a config asks for; a trained one is kept in the cache.

    Raises: UserError where one on disk is missing or broken, or the text cannot be read.
    """
    name = config.tokenizer
    if name == "auto":
        return load_tokenizer(model_folder) if model_folder is not None else byte_tokenizer()
    if name == "byte":
        return byte_tokenizer()
    if name != "bpe":
        return load_tokenizer(name)
    rule = DocumentRule.of(config)
    facts = [_VERSION, [file_digest(path) for path in config.files], asdict(rule)]
    key = _fingerprint([*facts, config.vocab_size, tokenizers.__version__])
    file = cache_folder(config) / f"bpe-{key}.json"
    if file.is_file():
        kept = parse_tokenizer(file.read_text(encoding="utf-8"), str(file))
        return TextTokenizer(
            json_text=kept.json_text,
            end_id=kept.end_id,
            vocab_size=kept.vocab_size,
            extra_files=byte_tokenizer().extra_files,
        )
    with progress.task("train tokenizer", None):
        texts = (text for path in config.files for text in read_documents(path, rule))
        trained = train_bpe(texts, config.vocab_size)
    with atomic_path(file) as temporary:
        temporary.write_text(trained.json_text, encoding="utf-8")
    return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """Tokenized documents on disk, one after another."""

    tokens: np.ndarray
    """uint16 or uint32 [tokens], memory-mapped; each document ends with the end token."""
    offsets: np.ndarray
    """int64 [documents + 1], starts of documents in tokens."""
    fingerprint: str
    """16 hex digits of what the tokens were made from."""

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1


def tokenize_files(
    files: Sequence[Path], rule: DocumentRule, tokenizer: TextTokenizer, cache: Path
) -> TokenStore:
    """Tokens of text files, from the cache where the same were tokenized before.

    Raises: UserError where a file is missing, empty or not UTF-8, or the disk refuses.
    """
    digests = [file_digest(path) for path in files]
    kinds = [rule.kind_of(path) for path in files]
    key = _fingerprint([_VERSION, digests, kinds, asdict(rule), tokenizer.digest])
    folder = cache / key
    store = _open_store(folder, key)
    if store is not None:
        return store
    with atomic_dir(folder, overwrite=True) as temporary:
        _write_store(files, rule, tokenizer, temporary)
    store = _open_store(folder, key)
    if store is None:
        raise UserError(f"data: the token cache {folder} does not read back; remove it, try again")
    return store


def _fingerprint(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _open_store(folder: Path, key: str) -> TokenStore | None:
    try:
        facts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        offsets = np.load(folder / "offsets.npy", allow_pickle=False)
        dtype, count = np.dtype(facts["dtype"]), int(facts["num_tokens"])
        file = folder / "tokens.bin"
        good = file.stat().st_size == count * dtype.itemsize and count > 0
        good = good and offsets.dtype == np.int64 and int(offsets[-1]) == count
        if not good or len(offsets) != facts["num_documents"] + 1:
            return None
        tokens = np.memmap(file, dtype=dtype, mode="r", shape=(count,))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return TokenStore(tokens=tokens, offsets=offsets, fingerprint=key)


def _write_store(
    files: Sequence[Path], rule: DocumentRule, tokenizer: TextTokenizer, folder: Path
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    built = tokenizer.build()
    lengths: list[int] = []
    total_bytes = sum(path.stat().st_size for path in files)
    with (
        progress.task("tokenize", total_bytes, "bytes") as advance,
        open(folder / "tokens.bin", "wb") as out,
    ):
        texts = (text for path in files for text in read_documents(path, rule))
        for batch in _batches(texts):
            for encoding in built.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoding.ids
                if not ids or ids[-1] != tokenizer.end_id:
                    ids = [*ids, tokenizer.end_id]
                lengths.append(len(ids))
                out.write(np.asarray(ids, dtype=dtype).tobytes())
            advance(sum(len(text.encode()) for text in batch))
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    np.save(folder / "offsets.npy", offsets, allow_pickle=False)
    facts = {
        "dtype": dtype.name,
        "num_tokens": int(offsets[-1]),
        "num_documents": len(lengths),
        "files": [path.name for path in files],
    }
    (folder / "tokens.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
