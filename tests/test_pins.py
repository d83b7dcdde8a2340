"""One pin a tool, the same in pyproject.toml and pre-commit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_same_pins_everywhere():
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "dev"
    ]
    pins = dict(entry.split("==") for entry in dev if "==" in entry.split(";")[0])
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.search(r"ruff-pre-commit\n\s+rev: v([\d.]+)", hooks)[1] == pins["ruff"]
    assert re.search(r"basedpyright==([\d.]+)", hooks)[1] == pins["basedpyright"]


def test_an_editable_install_is_a_plain_path():
    """Then the package is found before a folder of its name in the current one (a clone) counts as
    a namespace; an import hook would come after it."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "."}
