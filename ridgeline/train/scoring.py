"""Log-probabilities of a text as the training loss has them.

    score_t = log softmax(W x_t)[token_{t+1}]

In 16 bits a token's score depends on what is computed beside it (another height of a matmul adds in
another order). With batch_invariant it does not: the same bits for any text around it, and the
scores of an engine in batch-invariant mode, whichever way that came by its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ridgeline.core.errors import bad_value
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.invariant import ROWS, FixedRows, LoneQueries
from ridgeline.parallel.loss import IGNORE, token_logprobs


@torch.no_grad()
def log_probabilities(
    model: Decoder,
    token_ids: Sequence[int],
    *,
    batch_invariant: bool = False,
    max_len: int | None = None,
) -> torch.Tensor:
    """Log-probability of each token but the first, given those before it; fp32 [tokens - 1].

    max_len: tokens that the engine to compare with is made for (its max_model_len), on a GPU part
    of the kernel's choice; None: the text's.
    Raises: ValueError for fewer than two tokens, more than the model's context or than max_len.
    """
    limit = model.config.max_seqlen if max_len is None else min(max_len, model.config.max_seqlen)
    if not 2 <= len(token_ids) <= limit:
        raise bad_value(
            "scoring", "token_ids", f"be 2 to {limit} tokens", len(token_ids), "cut the text"
        )
    weight_VC = model.head_linear().weight
    ids = torch.tensor(token_ids, device=weight_VC.device)
    if not batch_invariant:
        x_PC = model.head_input(model.hidden(ids[None]))[0, :-1]
        return token_logprobs(x_PC, weight_VC, ids[1:])
    rows = ROWS[weight_VC.device.type]
    attend = LoneQueries(model.config, weight_VC.dtype, max_len or len(token_ids))
    with FixedRows():
        x_PC = model.head_input(model.hidden(ids[None], attend=attend))[0, :-1]
    more = -len(x_PC) % rows
    targets_P = F.pad(ids[1:], (0, more), value=IGNORE)
    found = token_logprobs(F.pad(x_PC, (0, 0, 0, more)), weight_VC, targets_P, chunk=rows)
    return found[: len(x_PC)]
