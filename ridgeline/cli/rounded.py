"""SmolLM2-135M rounded to 4 bits, for `ridgeline serve quickstart` where no quickstart has run.

Imported when it is needed (cli/serve.py): quantizing brings much that serving does not use.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.cli.stages.quantize import GROUP
from ridgeline.cli.stages.weights import model_folder


def round_to(folder: Path) -> None:
    """Fetch and convert the weights where they are not here, and write them in 4 bits.

    Raises: UserError when the weights cannot be had.
    """
    quantize(
        QuantizeConfig(
            model=model_folder(), out=folder, method="rtn", group_size=GROUP, device="cpu"
        )
    )
