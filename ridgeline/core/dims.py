"""The project's one legend of dimension letters.

Host and model tensors end in their logical dims, in order: `q_BSHD` is (batch, query token, query
head, head dim). The suffix never encodes sharding. A letter is never redefined in a file.
Source: Noam Shazeer, "Shape Suffixes: Good Coding Style", 2024.
"""

from __future__ import annotations

DIMS: dict[str, str] = {
    "B": "batch (sequences)",
    "S": "query tokens of a sequence",
    "T": "key tokens of a sequence",
    "P": "packed tokens: all sequences of a batch joined (varlen)",
    "C": "model width (hidden size)",
    "H": "query heads",
    "G": "key/value heads (GQA groups)",
    "D": "head dim",
    "F": "feed-forward width",
    "V": "vocabulary",
    "L": "layers",
    "M": "GEMM rows (tokens)",
    "N": "GEMM columns (output features)",
    "K": "GEMM reduction (input features)",
    "R": "quantization groups along K",
    "U": "pages of a sequence",
    "W": "slots (tokens) of a page",
}


def describe(suffix: str) -> str:
    """Spell a suffix out: describe("BSHD") -> "batch (sequences) x query tokens ...".

    Raises: ValueError for a letter that the legend lacks.
    """
    unknown = [letter for letter in suffix if letter not in DIMS]
    if unknown:
        raise ValueError(
            f"dims: suffix must use letters of the legend ({''.join(DIMS)}), got {suffix!r}; "
            f"{unknown[0]!r} is not one"
        )
    return " x ".join(DIMS[letter] for letter in suffix)
