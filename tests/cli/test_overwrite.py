import json

import pytest

from ridgeline.cli.convert import ConvertConfig, convert
from ridgeline.cli.overwrite import check_out
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.core.errors import UserError


def run(command, source, out):
    if command == "convert":
        return convert(ConvertConfig(source=source, out=out, overwrite=True))
    return quantize(
        QuantizeConfig(model=source, out=out, method="rtn", group_size=32, overwrite=True)
    )


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_a_folder_of_the_user_is_left_alone(command, model_folder, tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=rf"{command}: out must be a model folder .*thesis.txt"):
        run(command, model_folder, out)
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_what_was_written_can_be_replaced(command, model_folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder too
    run(command, model_folder, out)
    before = (out / "config.json").stat().st_ino
    run(command, model_folder, out)
    assert (out / "config.json").stat().st_ino != before


def model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_rule(tmp_path, monkeypatch):
    source, out = model(tmp_path / "models" / "source"), model(tmp_path / "out")
    check_out("convert", out, source, overwrite=True)
    check_out("convert", tmp_path / "new", source, overwrite=False)
    with pytest.raises(UserError, match=r"exists; choose another or pass --overwrite"):
        check_out("convert", out, source, overwrite=False)
    for folder in (source, source.parent, tmp_path, source / ".." / "source"):
        with pytest.raises(UserError, match=r"must not be or contain the source"):
            check_out("convert", folder, source, overwrite=True)
    (out / "notes").mkdir()
    with pytest.raises(UserError, match=r"which holds notes"):
        check_out("convert", out, source, overwrite=True)
    (out / "notes").rmdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"names no model"):
        check_out("convert", out, source, overwrite=True)
    (out / "config.json").unlink()
    with pytest.raises(UserError, match=r"no readable config.json"):
        check_out("convert", out, source, overwrite=True)
    (tmp_path / "link").symlink_to(model(tmp_path / "linked"))
    with pytest.raises(UserError, match=r"is no folder"):
        check_out("convert", tmp_path / "link", source, overwrite=True)
    monkeypatch.chdir(model(tmp_path / "here"))
    with pytest.raises(UserError, match=r"must not be or contain the current folder"):
        check_out("convert", tmp_path / "here", source, overwrite=True)
