"""What cannot be written is a line that says what to do."""

import errno

import pytest

from tide_lm.run import files

CURES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EROFS: "the disk can only be read; choose another place",
    errno.EACCES: "you have no permission",
    errno.EFBIG: "File too large",
}


@pytest.mark.parametrize("number", CURES)
def test_an_error_of_the_system_names_what_was_written_and_the_cure(number, tmp_path, monkeypatch):
    error = OSError(number, "File too large")  # as a write raises it, which names no file

    def fail(path):
        raise error

    monkeypatch.setattr(files, "sync", fail)
    file, folder = tmp_path / "result.json", tmp_path / "folder"
    with pytest.raises(files.WriteError, match=f"^cannot write {file}: {CURES[number]}"):
        files.write_atomically(file, "text")
    with (
        pytest.raises(files.WriteError, match=f"^cannot write {folder}: {CURES[number]}"),
        files.write_folder(folder),
    ):
        raise error
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_are_found_and_left_as_they_were(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(files.WriteError, match=f"cannot write {place}: there is a file where a folder"):
            files.check_writable(place)
    files.check_writable(tmp_path / "new" / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_replaced_is_not_free(tmp_path, monkeypatch):
    files.check_free(tmp_path)
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} is where a disk is mounted.*: choose a folder in it"):
        files.check_free(tmp_path)


def test_an_error_while_reading_is_no_error_of_writing():
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "counts.npy")
    assert files.sentence(missing) == "counts.npy cannot be used: No such file or directory"
    full = OSError(errno.ENOSPC, "No space left on device", "rows.tide")
    assert files.sentence(full).startswith("cannot write rows.tide: the disk is full")
    assert files.sentence(OSError("fetch failed")) == "fetch failed"
    assert files.sentence(ConnectionRefusedError(errno.ECONNREFUSED, "It refused")) == "It refused"
