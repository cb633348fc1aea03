"""Arguments to files: which names a directory or a pattern stands for, in which order, and what is left out."""

import itertools
import os
import random
from pathlib import Path

import pytest

from cbgen.data.expand import NamedFile, expand_inputs
from cbgen.data.sources import check_inputs
from cbgen.errors import InputError


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"prompt": "a"}\n')
    return root


def labels(*paths: object, exclude: tuple[object, ...] = ()) -> list[str]:
    return [file.label for file in expand_inputs(tuple(map(str, paths)), tuple(map(str, exclude)))]


def test_directory_is_read_in_natural_order_over_path_components(tmp_path: Path) -> None:
    names = ["a/part-2.jsonl", "a/part-10.jsonl", "a10/part-1.jsonl", "a9/part-1.jsonl", "b.jsonl", "B.jsonl"]

    assert labels(make(tmp_path, *names)) == [
        "B.jsonl", "a/part-2.jsonl", "a/part-10.jsonl", "a9/part-1.jsonl", "a10/part-1.jsonl", "b.jsonl",
    ]  # fmt: skip


def test_order_is_total_and_the_same_whatever_the_directory_lists_first(tmp_path: Path) -> None:
    names = [f"{a}{b}.jsonl" for a, b in itertools.product(["x", "x-", "", "007", "7"], ["1", "01", "10", "2", "é"])]
    random.Random(0).shuffle(names)
    make(tmp_path, *names)
    found = labels(tmp_path)

    assert sorted(found) == sorted(names)
    assert [name for name in found if name in ("x1.jsonl", "x2.jsonl", "x10.jsonl")] == [
        "x1.jsonl", "x2.jsonl", "x10.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "parquet", "pq", "jsonl.gz", "json.zst", "JSONL"])
def test_names_with_a_known_ending_are_taken(tmp_path: Path, suffix: str) -> None:
    make(tmp_path, f"a.{suffix}", "README.md", "a.csv", "a.jsonl.tmp", "a.jsonl.crc", "jsonl")

    assert labels(tmp_path) == [f"a.{suffix}"]


def test_litter_is_skipped_at_every_level(tmp_path: Path) -> None:
    litter = [
        "_SUCCESS.json",
        ".hidden.jsonl",
        "_tmp/a.jsonl",
        ".git/a.jsonl",
        "out.jsonl.cbgen/state.json",
        "x/_y/z.pq",
    ]
    make(tmp_path, "a.jsonl", *litter)

    assert labels(tmp_path) == ["a.jsonl"]
    assert labels(f"{tmp_path}/**/*.json*") == ["a.jsonl"]
    assert labels(f"{tmp_path}/**") == ["a.jsonl"]


def test_directory_below_a_hidden_one_can_be_named(tmp_path: Path) -> None:
    make(tmp_path / ".cache" / "_data", "a.jsonl")

    assert labels(tmp_path / ".cache" / "_data") == ["a.jsonl"]
    assert labels(f"{tmp_path}/.cache/_data/*") == ["a.jsonl"]
    assert labels(f"{tmp_path}/.c*/_*/*") == [".cache/_data/a.jsonl"]


def test_output_sidecar_and_backups_are_no_input(tmp_path: Path) -> None:
    make(tmp_path, "in.jsonl", "out.jsonl", "out.jsonl.backup-1", "out.jsonl.backup-2.jsonl", "out.jsonl.cbgen/a.jsonl")
    make(tmp_path, "parts/0.jsonl", "outer.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    exclude = (os.path.relpath(tmp_path / "out.jsonl"), tmp_path / "parts")

    assert labels(tmp_path, exclude=exclude) == ["in.jsonl", "outer.jsonl"]
    assert labels(f"{tmp_path}/*.jsonl", exclude=exclude) == ["in.jsonl", "outer.jsonl"]
    assert labels(tmp_path / "out.jsonl", exclude=exclude) == ["out.jsonl"]  # named on purpose: refused elsewhere


def test_output_that_does_not_exist_yet_hides_nothing(tmp_path: Path) -> None:
    assert labels(make(tmp_path, "in.jsonl"), exclude=(tmp_path / "out.jsonl",)) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl", "part-2.jsonl", "part-10.jsonl"]),
        ("part-*", ["part-2.jsonl", "part-10.jsonl"]),
        ("part-?.jsonl", ["part-2.jsonl"]),
        ("part-[0-2]*.jsonl", ["part-2.jsonl", "part-10.jsonl"]),
        ("*/c.csv", ["d/c.csv"]),
        ("**/b.jsonl", ["d/b.jsonl", "d/e/b.jsonl"]),
        ("d/**/b.jsonl", ["b.jsonl", "e/b.jsonl"]),
        ("d*", ["d/b.jsonl", "d/e/b.jsonl"]),
        ("?/e", ["d/e/b.jsonl"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    make(tmp_path, "a.jsonl", "part-10.jsonl", "part-2.jsonl", "d/b.jsonl", "d/e/b.jsonl", "d/c.csv")

    assert labels(f"{tmp_path}/{pattern}") == expected


def test_pattern_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, "a.jsonl", "b.jsonl"))

    assert [file.path for file in expand_inputs(("*.jsonl",))] == ["./a.jsonl", "./b.jsonl"]


def test_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    make(tmp_path, "a[1].jsonl", "a1.jsonl", "b*.jsonl", "bc.jsonl")

    assert labels(tmp_path / "a[1].jsonl", tmp_path / "b*.jsonl") == ["a[1].jsonl", "b*.jsonl"]


def test_link_to_a_directory_is_followed_and_a_circle_ends(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jsonl", "else/b.jsonl")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "back").symlink_to(tmp_path / "in")

    assert labels(tmp_path / "in") == ["a.jsonl", "linked/b.jsonl"]


def test_link_that_leads_nowhere_is_a_missing_file_not_a_missing_shard(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")

    assert labels(tmp_path) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(InputError, match=r"cannot read .*b\.jsonl: No such file"):
        check_inputs((str(tmp_path),))


def test_pipes_and_sockets_in_a_directory_are_not_data_files(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    os.mkfifo(tmp_path / "b.jsonl")

    assert labels(tmp_path) == ["a.jsonl"]


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "_logs/a.jsonl")

    with pytest.raises(InputError, match="has no data files in it"):
        labels(tmp_path)


def test_directory_of_other_files_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make(tmp_path, "part-0", "part-1")

    with pytest.raises(InputError, match=r"no file with a known ending.*'part-0'.*pattern .*/\*"):
        labels(tmp_path)
    assert labels(f"{tmp_path}/*") == ["part-0", "part-1"]


@pytest.mark.parametrize("name", ["b.jsonl.bz2", "d/b.json.xz", "b.parquet.LZ4", "b.ndjson.zip"])
@pytest.mark.parametrize("pattern", ["", "/x*"])
def test_data_file_that_is_compressed_in_another_way_is_not_missed_silently(
    tmp_path: Path, name: str, pattern: str
) -> None:
    make(tmp_path / "x", "a.jsonl", name)

    with pytest.raises(InputError, match=rf"/{name} is compressed in a way that is not read here; decompress it or"):
        labels(f"{tmp_path}{pattern}")
    assert labels(f"{tmp_path}/x/*.jsonl") == ["a.jsonl"]


def test_other_litter_beside_data_files_is_skipped(tmp_path: Path) -> None:
    make(
        tmp_path,
        "a.jsonl",
        "b.csv",
        "b.tsv",
        "b.csv.bz2",
        "b.jsonl.part",
        "jsonl.bz2",
        "notes.zip",
        "dataset_info.json",
    )

    assert labels(tmp_path) == ["a.jsonl"]


def test_directory_of_a_saved_dataset_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make(
        tmp_path, "dataset_dict.json", "train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json"
    )

    for directory in (tmp_path, tmp_path / "train", f"{tmp_path}/tr*"):
        with pytest.raises(InputError, match=r"/train/data-0.*\.arrow is an Arrow file.*; export them to Parquet"):
            labels(directory)


def test_notes_about_a_dataset_are_no_rows(tmp_path: Path) -> None:
    make(tmp_path, "dataset_infos.json", "train/a.parquet", "train/dataset_info.json", "state.json", "b/state.json")
    make(tmp_path, "b/data-0.arrow")

    assert labels(tmp_path) == ["state.json", "train/a.parquet"]


def test_pattern_without_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file matches .*/x\*"):
        labels(f"{tmp_path}/x*")


def test_file_may_be_given_twice(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")

    assert labels(tmp_path / "a.jsonl", tmp_path / "a.jsonl", tmp_path) == ["a.jsonl"] * 3


def test_files_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    make(tmp_path, "x/a.jsonl", "y/a.jsonl", "y/b.jsonl")

    assert labels(tmp_path / "x" / "a.jsonl", tmp_path / "y") == [
        f"{tmp_path}/x/a.jsonl", f"{tmp_path}/y/a.jsonl", "b.jsonl",
    ]  # fmt: skip


def test_file_uri_is_a_path(tmp_path: Path) -> None:
    make(tmp_path, "a b.jsonl")

    assert expand_inputs((f"file://{tmp_path}/a%20b.jsonl",)) == [NamedFile(f"{tmp_path}/a b.jsonl", "a b.jsonl")]
    assert labels(f"file://{tmp_path}") == ["a b.jsonl"]
