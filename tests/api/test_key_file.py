"""Files of API keys: their format, and the errors for files that cannot be used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.api.key_file import KeyRecord, digest_of, read_key_file, warning_about
from penstock.errors import ConfigError

HEX = hashlib.sha256(b"of-bob").hexdigest()


def read(folder: Path, text: str) -> list[KeyRecord]:
    file = folder / "keys"
    file.write_text(text)
    return read_key_file(str(file))


def test_a_file_has_one_key_in_each_line(tmp_path: Path) -> None:
    records = read(tmp_path, "# the old one\nold\n\n  new \r\n#key\nold\n")
    assert [record.name for record in records] == ["line-2", "line-4", "line-5"]
    assert [record.digests for record in records] == [(digest_of(key),) for key in (b"old", b"new", b"#key")]


def test_a_yaml_file_has_entries_with_names_and_limits(tmp_path: Path) -> None:
    search, ops, plain = read(
        tmp_path,
        "# clients\n- name: search\n  key: [old-key, new-key]\n  max_concurrent_requests: 8\n"
        "  max_tokens_per_second: 2000.5\n  weight: 2\n  models: [a, b]\n"
        "- {key: 'of-ops', admin: true}\n- of-bob\n",
    )
    assert (search.name, search.max_concurrent_requests, search.max_tokens_per_second) == (
        "search",
        8,
        2000.5,
    )
    assert (search.weight, search.models, search.admin) == (2.0, ("a", "b"), False)
    assert search.digests == (digest_of(b"old-key"), digest_of(b"new-key"))
    assert ops.admin and ops.name == "entry-2" and ops.models is None
    assert plain.digests == (digest_of(b"of-bob"),)


@pytest.mark.parametrize("text", [f"sha256:{HEX}\n", f"- key: sha256:{HEX.upper()}\n"])
def test_a_key_may_be_given_as_its_digest(tmp_path: Path, text: str) -> None:
    (record,) = read(tmp_path, text)
    assert record.digests == (digest_of(b"of-bob"),)


def test_all_keys_of_an_admin_file_are_admin_keys(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("one\ntwo\n")
    assert all(record.admin for record in read_key_file(str(file), "--admin-key-file", admin=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {key: s3cret, limit: 5}", "entry 1 has an unknown field. An entry takes key, name, admin"),
        ("- {key: s3cret, weights: 5}", "did you mean weight"),
        ("- {name: a}", "it lacks the field `key`"),
        ("- {key: s3cret, weight: 0}", "weight"),
        ("- {key: s3cret, weight: heavy}", "weight"),
        ("- {key: s3cret, max_concurrent_requests: 0}", "max_concurrent_requests"),
        ("- {key: s3cret, max_tokens_per_second: -1}", "max_tokens_per_second"),
        ("- {key: s3cret, models: []}", "models is an empty list"),
        ("- {key: []}", "key is an empty list"),
        ("- {key: 12345}", "put it in quotes"),
        ("- 12345", "put the key in quotes"),
        ("- {key: s3cret, name: 'my name'}", "letters, digits"),
        ("- {key: s3cret}\n- {key: s3cret}", "entries 1 and 2 have the same key"),
        ("- {key: s3cret, name: a}\n- {key: other, name: a}", "same name"),
        ("- {key: sha256:12}", "64 hexadecimal digits"),
        ("- {key: 's3 cret'}", "visible ASCII"),
        ("- {key: s3cret\n- x", "not valid YAML near line"),
        ("- *s3cret\n", "not valid YAML"),
        ("[]", "has no key"),
        ("{key: s3cret}", "must be a list"),
        ("s3 cret", "line 1"),
    ],
)
def test_an_error_names_the_entry_and_shows_no_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    message = refused.value.message
    assert words in message and "--api-key-file" in message and "cret" not in message


def test_a_file_that_everybody_can_read_is_warned_about_unless_it_holds_digests_only(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text, mode, warns in (
        ("of-bob", 0o644, True),
        ("of-bob", 0o640, False),
        (f"sha256:{HEX}", 0o644, False),
        (f"- {{key: [sha256:{HEX}, other]}}", 0o644, True),
    ):
        file.write_text(text)
        file.chmod(mode)
        warning = warning_about(str(file), "--api-key-file", read_key_file(str(file)))
        assert (warning is not None) == warns, text
        assert warning is None or "of-bob" not in warning
