"""Flags for images: accepted values, and errors for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from penstock.cli.main import app
from penstock.cli.media_flags import image_pixels, media_domains, media_folder, mm_limits
from penstock.config import ServerConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "given", ["image=8", '{"image": 8}', '{"image": {"count": 8, "width": 512}}', "image=8,video=0"]
)
def test_limits_of_a_prompt_are_read_in_every_spelling(given: str) -> None:
    assert mm_limits(given)["image"] == 8
    assert ServerConfig(limit_mm_per_prompt=mm_limits(given)).max_images == 8


@pytest.mark.parametrize(
    "given", ["image", "picture=8", "image=-1", "{", '{"image": "x"}', '{"image": true}']
)
def test_other_limits_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="use image=N or a JSON object"):
        mm_limits(given)


def test_hosts_are_names_with_or_without_a_port() -> None:
    names = "Images.Example.com,*.example.org,127.0.0.1:9000,*"
    assert media_domains(names) == ("images.example.com", "*.example.org", "127.0.0.1:9000", "*")
    assert media_domains('["a.example", "b.example"]') == ("a.example", "b.example")
    for wrong in ("https://a.example", "a.example/path", "a b", "**", "[x]"):
        with pytest.raises(ConfigError, match="use hosts such as"):
            media_domains(wrong)


def test_a_local_folder_has_to_exist(tmp_path: Path) -> None:
    assert media_folder(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        media_folder(str(tmp_path / "missing"))


def test_no_more_pixels_are_accepted_than_the_decoder_takes() -> None:
    assert image_pixels(1000) == 1000
    with pytest.raises(ConfigError, match="use at most 178,956,970"):
        image_pixels(10**9)


def test_one_flag_takes_several_hosts_once_the_model_is_named() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for given, models in (
        (["clip", "--allowed-media-domains", "a.example", "b.example:9000", "--port", "1"], ["clip"]),
        (["clip", "--allowed-media-domains", "a.example,b.example:9000", "org/other"], ["clip", "org/other"]),
    ):
        params = command.make_context("serve", given).params
        domains = params["serverconfig_allowed_media_domains"]
        assert media_domains(domains) == ("a.example", "b.example:9000")
        assert params["models"] == models
