"""What the page's files say of themselves, and that they ask nobody else."""

import re

import httpx
import pytest

from vivavoce.server.rest.http import MEDIA_TYPES, page_files


async def test_the_page_is_at_the_root_with_a_strict_policy(server):
    async with httpx.AsyncClient() as http:
        answer = await http.get(server.http)
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", sorted(page_files()))
async def test_every_file_has_its_type_and_is_not_sent_twice(server, name):
    address = f"{server.http}/{'' if name == 'index.html' else name}"
    async with httpx.AsyncClient() as http:
        first = await http.get(address)
        again = await http.get(address, headers={"If-None-Match": first.headers["etag"]})
    assert first.headers["content-type"] == MEDIA_TYPES[name[name.rindex(".") :]]
    assert (again.status_code, again.content) == (304, b"")


async def test_nothing_else_of_the_package_is_served(server):
    async with httpx.AsyncClient() as http:
        for path in ("/app.py", "/../app.py", "/%2e%2e/app.py", "/page/", "/page_files.py"):
            assert (await http.get(server.http + path)).status_code == 404


def test_every_import_and_link_is_a_file_of_the_page():
    files = page_files()
    for name, file in files.items():
        text = file.content.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), f"{name} names another host"
        linked = re.findall(r'(?:from "\./|addModule\("|(?:src|href)=")([\w.-]+)"', text)
        assert set(linked) <= set(files), name
        assert len(text.splitlines()) < 400


async def test_voices_are_for_those_with_a_key(running):
    server = await running(api_keys=("a-secret-of-the-house",))
    async with httpx.AsyncClient() as http:
        address = f"{server.http}/v1/audio/voices"
        assert (await http.get(address)).status_code == 401
        voices = await http.get(address, headers={"Authorization": "Bearer a-secret-of-the-house"})
        assert voices.json()["voices"] == ["ada", "ben"]
        assert (await http.get(server.http)).status_code == 200
