import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from epp.shell.operators.pages.bearer_token import TOKEN_BYTES_MAX, BearerToken
from epp.shell.starting import StartError


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    return file


async def status(token, **headers):
    """Of a page that `token` guards; the header that says how to ask."""

    async def page(_):
        return web.Response(text="page")

    application = web.Application()
    application.add_routes([web.get("/debug/x", token.guarded(page))])
    async with (
        TestClient(TestServer(application)) as client,
        client.get("/debug/x", headers=headers) as response,
    ):
        assert (await response.text() == "page") == (response.status == 200)
        return response.status, response.headers.get("WWW-Authenticate")


@pytest.mark.parametrize(
    "authorization",
    ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "],
)
async def test_whoever_shows_the_token_sees_the_page(file, authorization):
    """The scheme is written in any case."""
    assert await status(BearerToken(file), Authorization=authorization) == (200, None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer s3cre"},
        {"Authorization": "Bearer s3crets"},
        {"Authorization": "Bearer S3CRET"},
        {"Authorization": "Basic s3cret"},
        {"Authorization": "s3cret"},
        {"Authorization": "Bearer sécret"},
        {"X-Authorization": "Bearer s3cret"},
    ],
)
async def test_all_others_are_told_how_to_ask(file, headers):
    assert await status(BearerToken(file), **headers) == (401, 'Bearer realm="homing"')


async def test_a_token_that_changes_counts_at_once(file):
    """The old one no longer does; a bad file changes nothing and is reported once."""
    token = BearerToken(file)
    file.write_text("another")
    with structlog.testing.capture_logs() as lines:
        token._watcher.poll()
        assert (await status(token, Authorization="Bearer another"))[0] == 200
        assert (await status(token, Authorization="Bearer s3cret"))[0] == 401
        file.write_text("two words")
        token._watcher.poll()
        file.unlink()
        token._watcher.poll()
        token._watcher.poll()
        assert (await status(token, Authorization="Bearer another"))[0] == 200
    assert [line["log_level"] for line in lines] == ["info", "error", "error"]
    assert "another" not in str(lines)
    assert "two words" not in str(lines)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no valid token, expected one line"),
        (b" \n", "has no valid token"),
        (b"two words", "has no valid token"),
        (b"two\nlines", "has no valid token"),
        (b"\xff", "has no valid token"),
        (b"x" * (TOKEN_BYTES_MAX + 1), f"larger than {TOKEN_BYTES_MAX} bytes"),
        (None, "No such file"),
    ],
)
def test_without_a_token_nothing_starts(tmp_path, content, why):
    """Pages that nobody protects because a file is empty would be a surprise."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError, match=why) as told:
        BearerToken(file)
    assert str(told.value).startswith(f"--debug-token-file {file} ")
    assert "two" not in str(told.value)
