"""The stories that come with the package are what stories.md says of them."""

import re
from importlib import resources

import pytest

from tide_lm.data import sources, stories

TOLD = resources.files("tide_lm.data").joinpath("stories.md").read_text(encoding="utf-8")
BOOKS = {
    title: (author, int(documents), int(size.replace(",", "")), file)
    for title, author, documents, size, file in re.findall(
        r"^\| (.+?) \| (.+?) \| (\d+) \| ([\d,]+) \| (.+?) \|$", TOLD, re.MULTILINE
    )
}


def texts_of(book: str) -> list[str]:
    return [text for name, text in stories.documents() if name.rpartition("/")[0] == book]


def test_each_book_is_whole_and_has_the_title_author_and_size_that_are_told():
    assert {name.rpartition("/")[0] for name, _ in stories.documents()} == BOOKS.keys()
    for title, (author, documents, size, file) in BOOKS.items():
        texts = texts_of(title)
        assert (len(texts), len("\n\n".join(texts).encode())) == (documents, size)
        assert texts[0].startswith(f"{title}\n\nby {author}\n\n")
        assert file == f"{author}/{title}.md"
        assert all(text.strip() == text != "" for text in texts)
    assert sum(len(text) for _, text in stories.documents()) > 1_000_000


def test_the_stories_are_small_enough_to_come_with_the_package():
    assert len(resources.files("tide_lm.data").joinpath("stories.jsonl.xz").read_bytes()) < 500_000


def test_the_source_stories_is_these_books_and_a_folder_of_that_name_is_still_reachable(
    tmp_path, monkeypatch
):
    (part,) = sources.parts("stories")
    assert list(part.documents()) == list(stories.documents())
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "mine.txt").write_text("Mine.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"and a path here too: write {tmp_path / 'stories'} to"):
        sources.parts("stories")
    for source in "./stories", str(tmp_path / "stories"):
        (part,) = sources.parts(source)
        assert [text for _, text in part.documents()] == ["Mine."]
