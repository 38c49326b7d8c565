"""Generated blocks of a page: what is between the comments is made anew, and all else is left alone."""

from pathlib import Path

import pytest

from studies.blocks import names, rewrite, rewritten

BLOCKS = {"table": lambda: "| a |\n| --- |\n| 7 |", "loss": lambda: "4.567"}
PAGE = """# Free *prose*, 1.23

<!-- numbers: table -->

| a |
| --- |
| 8 |

<!-- end -->

It is <!-- numbers: loss -->9.999<!-- end --> nats, and <!-- a remark --> 5 % more.
"""


def test_only_what_is_between_the_comments_changes():
    made = rewritten(PAGE, BLOCKS)
    assert made == PAGE.replace("| 8 |", "| 7 |").replace("9.999", "4.567")
    assert rewritten(made, BLOCKS) == made
    assert names(PAGE) == ["table", "loss"]


@pytest.mark.parametrize(
    "empty", ["<!-- numbers: table -->\n<!-- end -->", "<!-- numbers: loss --><!-- end -->"]
)
def test_a_block_may_begin_empty(empty):
    (name,) = names(empty)
    assert BLOCKS[name]() in rewritten(empty, BLOCKS)
    assert ("\n\n|" in rewritten(empty, BLOCKS)) == (name == "table")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- numbers: tabel --> <!-- end -->", "tabel: use one of loss, table"),
        ("<!-- numbers: table --> and no more", "<!-- numbers: table --> is no part of a block: write"),
        ("<!-- numbers: loss --> <!-- end --> <!-- end -->", "<!-- end --> is no part of a block: write"),
        ("<!-- numbers: a b --> <!-- end -->", "<!-- numbers: a b --> is no part of a block: write"),
        ("<!-- numbers:loss -->1<!-- end -->", "<!-- numbers:loss --> is no part of a block: write"),
        (
            "<!-- numbers: loss --> <!-- numbers: table --> <!-- end -->",
            "<!-- numbers: table --> stands inside the block loss: end",
        ),
    ],
)
def test_comments_that_are_no_block_are_named(page, said):
    with pytest.raises(ValueError, match="block") as error:
        rewritten(page, BLOCKS)
    assert said in str(error.value)


def test_pages_are_written_where_a_block_changed_and_none_if_one_cannot_be(tmp_path):
    first, second, third = (tmp_path / f"{name}.md" for name in "abc")
    first.write_text(PAGE)
    second.write_text(rewritten(PAGE, BLOCKS))
    third.write_text("<!-- numbers: other --> <!-- end -->")
    with pytest.raises(ValueError, match=r"c\.md: there is no block other"):
        rewrite([first, second, third], BLOCKS)
    assert first.read_text() == PAGE
    assert rewrite([first, second], BLOCKS) == [first]
    assert first.read_text() == second.read_text() == rewritten(PAGE, BLOCKS)


def test_a_page_that_cannot_be_written_stays_whole(tmp_path, monkeypatch):
    page = tmp_path / "a.md"
    page.write_text(PAGE)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        rewrite([page], BLOCKS)
    assert page.read_text() == PAGE
    assert [path.name for path in tmp_path.iterdir()] == ["a.md"]
