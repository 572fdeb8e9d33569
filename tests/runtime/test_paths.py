import os

import platformdirs
import pytest

from warp_embed.runtime import paths


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda *a, **k: str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", [str, os.fspath, os.fsencode, lambda p: p])
def test_a_path_is_found_whatever_its_type(home, kind):
    folder = make(home / "with space ümlaut.waste")
    assert paths.find_model(kind(folder)) == folder


@pytest.mark.parametrize("stored", ["kimi", "kimi.waste"])
def test_a_name_is_found_in_the_models_folder(home, stored):
    folder = make(home / "data" / "models" / stored)
    assert paths.find_model("kimi") == folder


def test_a_path_goes_before_a_name_and_the_bare_name_before_the_suffix(home):
    stored = make(home / "data" / "models" / "kimi")
    make(home / "data" / "models" / "kimi.waste")
    assert paths.find_model("kimi") == stored
    make(home / "kimi")
    assert paths.find_model("kimi").resolve() == (home / "kimi").resolve()


def test_what_is_missing_names_the_folders_searched(home):
    with pytest.raises(FileNotFoundError) as error:
        paths.find_model("absent")
    assert str(home) in str(error.value) and str(home / "data" / "models") in str(error.value)


@pytest.mark.parametrize("name", ["", "a/../../etc", "../data", "sub/absent", "a\0b", "x" * 5000])
def test_only_a_plain_name_is_looked_up_in_the_models_folder(home, name):
    make(home / "data" / "models" / "absent")
    (home / "data" / "models" / "a").mkdir()
    with pytest.raises((FileNotFoundError, OSError, ValueError)):
        paths.find_model(name)


def test_a_file_is_not_a_model(home):
    (home / "model.gguf").write_text("x")
    with pytest.raises(NotADirectoryError, match="manifest.json"):
        paths.find_model("model.gguf")


def test_the_list_of_models(home):
    assert paths.list_models() == []
    second, first = make(home / "data/models/b.waste"), make(home / "data/models/a")
    (home / "data/models/no-container").mkdir()
    (home / "data/models/file").write_text("")
    assert paths.list_models() == [first, second]
