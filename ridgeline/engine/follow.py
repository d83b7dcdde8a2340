"""What the ranks other than 0 do: the steps that rank 0 says, and new weights beside them.

step, embed     compute this rank's part
load            begin to load a folder, on a thread; steps go on meanwhile
loaded          report: loading, ready, or failed and why
swap, drop      run with what was loaded; forget it
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.engine import tp
from ridgeline.engine.runner import StepBatch
from ridgeline.engine.weights import Weights

if TYPE_CHECKING:
    from ridgeline.engine.llm import LLM


class Loading:
    """Weights that are being loaded on a thread."""

    def __init__(self, llm: LLM, folder: Path) -> None:
        self.weights: Weights | None = None
        self.error: str | None = None
        self._llm, self._folder = llm, folder
        self._thread = threading.Thread(target=self._load, name="ridgeline-load", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            if self._llm.group is not None:  # a new thread's GPU is the first, not this rank's
                self._llm.group.make_current()
            self.weights = self._llm.load_beside(self._folder)
        except Exception as error:  # told to rank 0, which refuses the reload
            self.error = f"{type(error).__name__}: {error}"

    def state(self) -> tuple[str, str]:
        """A word and the reason."""
        if self.error is not None:
            return "failed", self.error
        return ("loading", "") if self.weights is None else ("ready", "")


class Follower:
    """One rank's side of the messages."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.loading: Loading | None = None

    def run(self) -> None:
        """Until rank 0 says stop. Raises: RuntimeError when rank 0 is gone."""
        assert self.llm.group is not None
        runner = self.llm.runner
        tp.follow(
            self.llm.group,
            {
                "step": lambda body: runner.run(StepBatch.from_message(body)),
                "embed": lambda body: runner.embed(*body),
                "load": self._load,
                "loaded": self._report,
                "swap": self._swap,
                "drop": self._drop,
            },
        )

    def _load(self, folder: str) -> None:
        self.loading = Loading(self.llm, Path(folder))

    def _report(self, body: object) -> None:
        del body
        assert self.llm.group is not None and self.loading is not None
        self.llm.group.report(*self.loading.state())

    def _swap(self, body: object) -> None:
        del body
        assert self.loading is not None and self.loading.weights is not None
        self.llm.runner.set_weights(self.loading.weights)
        self.loading = None

    def _drop(self, body: object) -> None:
        del body
        self.loading = None
