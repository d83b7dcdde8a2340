"""Text to token ids and back, from a Hugging Face folder's tokenizer.json.

The `tokenizers` library does the work; this adds the special tokens' roles, the chat template and
incremental decoding that never cuts a UTF-8 character.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ridgeline.core.errors import UserError, bad_value
from ridgeline.nn.chat import ChatTemplate
from ridgeline.nn.tensorfile import one_line, read_json

REPLACEMENT = "\ufffd"
"""What an incomplete UTF-8 sequence decodes to."""
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a folder.

    Raises: UserError for a missing or malformed tokenizer.json.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"tokenizer: tokenizer.json must exist, got none in {self.folder}; "
                "copy it from the model's source"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer: {path} must be a tokenizer of the tokenizers library, got "
                f"{one_line(error)}; fetch it again"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = self.folder / "tokenizer_config.json"
        self._config = read_json(config_path) if config_path.is_file() else {}
        self.special_tokens = self._roles()
        self._special_ids = {
            index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        source = self._template_source()
        self.chat_template = None if source is None else ChatTemplate(source, self.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._tokenizer.get_vocab_size()

    def token_id(self, token: str) -> int | None:
        """Id of a token's text, or None."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it (not its text), or None."""
        return self._tokenizer.id_to_token(token_id)

    def role_id(self, role: str) -> int | None:
        """Id of "eos_token", "bos_token", ..., or None where the tokenizer has none."""
        token = self.special_tokens.get(role)
        return None if token is None else self.token_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one of the tokenizer's special tokens."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; with add_special_tokens also what the tokenizer puts around it."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Token ids of several texts, on several threads."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an incomplete UTF-8 sequence gives U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder that takes token by token."""
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **names: Any,
    ) -> str:
        """Prompt of a conversation (ChatTemplate.render).

        Raises: ValueError where the tokenizer has no chat template.
        """
        if self.chat_template is None:
            raise bad_value(
                "tokenizer",
                "chat_template",
                "come with the tokenizer",
                f"none in {self.folder}",
                "pass a plain prompt",
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **names
        )

    def _roles(self) -> dict[str, str]:
        path = self.folder / "special_tokens_map.json"
        sources = [self._config, read_json(path) if path.is_file() else {}]
        roles: dict[str, str] = {}
        for role in ROLES:
            for source in sources:
                token = source.get(role)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    roles.setdefault(role, token)
        return roles

    def _template_source(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        return template if isinstance(template, str) else None


class IncrementalDecoder:
    """Turns tokens into text as they come; the pieces joined equal one `decode` of all tokens.

    A byte-level token can end inside a UTF-8 character. Text is given out up to the trailing
    U+FFFD of what is decoded so far; later tokens can change nothing before it. Decoding restarts
    from the last few tokens, so a step costs no more in a long text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" or one word."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._text()
        stable = text.rstrip(REPLACEMENT)
        piece = stable[self._given :]
        self._given = max(self._given, len(stable))
        if len(stable) == len(text):
            self._context, self._pending = self._pending, []
            self._given = len(self._decode(self._context))
        return piece

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never got complete."""
        piece = self._text()[self._given :]
        self._context, self._pending, self._given = [], [], 0
        return piece

    def _text(self) -> str:
        return self._decode(self._context + self._pending)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
