"""Built-in tools by themselves: what they answer, and how they bound what models and servers do to them."""

import asyncio
import os
import socket
import threading
import time
from datetime import UTC, datetime

import numpy as np
import pytest

from vivavoce.errors import InputError
from vivavoce.server.tools import http_request as http_tool
from vivavoce.server.tools.calculator import calculator, evaluate, written
from vivavoce.server.tools.clock import clock
from vivavoce.server.tools.documents import NOTHING, documents
from vivavoce.server.tools.http_request import CheckedConnection, http_request
from vivavoce.server.tools.markup import without_markup
from vivavoce.server.tools.passages import Passage, PassageIndex, read_passages, split_passages
from vivavoce.server.tools.selection import selected_tools


class NoSession:
    def hang_up(self) -> None:
        raise AssertionError("no tool here hangs up")


async def output(tool, **arguments) -> str:
    return await tool.run(arguments, NoSession())


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) × 4 ÷ 8", "2.5"),
        ("2^10 - 1", "1023"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 4", "6"),
        ("-sqrt(16) + max(1, 200)", "196"),
        ("√(9) + round(2.345, 1)", "5.3"),
        ("(-1) ** 10**30", "1"),
        ("2 ** -2", "0.25"),
        ("12345678901234567890 * 10", "123456789012345678900"),
    ],
)
def test_arithmetic(expression, expected):
    assert written(evaluate(expression)) == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "9**9**9**9", "(9**300) * (9**300)", "10**308 * 10.0**308", "1e308 * 10", "2.0 ** 10000"),
        *("1 / 0", "0 ** -1", "sqrt(-1)", "(-1) ** 0.5", "round(5, -10**9)", "exp(1e9)", "floor(1e400)"),
        *("__import__('os')", "().__class__", "'a' * 10", "[1] * 9", "True + 1", "x", "sqrt", "max(*[1])"),
        *("(" * 290, "1 +", "", "2 if 1 else 3", "lambda: 1", "round(1, ndigits=2)", "f'{1}'", "-" * 299 + "1.x"),
    ],
)
def test_expressions_without_a_value_are_refused_at_once(expression):
    began = time.process_time()
    with pytest.raises(InputError):
        evaluate(expression)
    assert time.process_time() - began < 1, "it is refused before it is computed"


async def test_the_calculator_takes_text_of_a_bounded_length():
    assert await output(calculator(), expression=" 6 * 7 ") == "42"
    for bad in ("1+" * 1000 + "1", "", 42, None, ["1"]):
        with pytest.raises(InputError, match="expression"):
            await output(calculator(), expression=bad)


async def test_the_clock_knows_zones_and_days():
    tool = clock("Europe/Berlin", lambda: datetime(2026, 12, 31, 23, 30, tzinfo=UTC))
    assert await output(tool) == "Friday, 2027-01-01, 00:30:00, Europe/Berlin (UTC+0100)"
    assert (await output(tool, time_zone="America/New_York")).startswith("Thursday, 2026-12-31, 18:30:00, America/New")
    assert (await output(tool, time_zone="", days_from_now=-1)).startswith("Thursday, 2026-12-31, 00:30")
    for bad in ({"time_zone": "../../etc/passwd"}, {"time_zone": "Nowhere/City"}, {"time_zone": "Europe"}):
        with pytest.raises(InputError, match="time zone"):
            await output(tool, **bad)
    for days in (10**9, 1.5, "1", True):
        with pytest.raises(InputError, match="days_from_now"):
            await output(tool, days_from_now=days)
    with pytest.raises(InputError, match="no time zone 'Mars'"):
        clock("Mars")


@pytest.fixture
def folder(tmp_path):
    """A folder of texts, with links into it and out of it."""
    inside, outside = tmp_path / "texts", tmp_path / "outside"
    (inside / "deep").mkdir(parents=True)
    outside.mkdir()
    (inside / "hours.md").write_text("# Hours\n\nWe open at nine in the morning.\n\nOn Sundays we are closed.")
    (inside / "deep" / "parking.txt").write_text("Parking is free behind the house.")
    (inside / "zh.txt").write_text("退货政策：三十天内可以退货。\n\n营业时间是上午九点到下午六点。", encoding="utf8")
    (inside / "page.html").write_text("<style>b{}</style><p>The <b>lift</b> is out of order &amp; slow.</p>")
    (inside / "picture.png").write_bytes(os.urandom(100))
    (outside / "secret.txt").write_text("The password is swordfish, open at nine.")
    (inside / "link.txt").symlink_to(outside / "secret.txt")
    (inside / "linked").symlink_to(outside, target_is_directory=True)
    (inside / ".hidden.txt").write_text("Hidden things open at nine.")
    return inside


async def test_passages_are_found_in_english_and_chinese(folder):
    tool = documents([folder])
    assert (await output(tool, query="When do you open in the morning?")).startswith("[hours.md]\n")
    assert (await output(tool, query="Where is PARKING")).startswith("[deep/parking.txt]\n")
    assert (await output(tool, query="可以退货吗")).startswith("[zh.txt]\n退货政策")
    assert "lift is out of order & slow." in " ".join((await output(tool, query="lift")).split())
    assert await output(tool, query="zebra 斑马") == NOTHING


def test_links_out_of_the_folder_and_hidden_files_are_left_out(folder):
    texts = " ".join(passage.text for passage in read_passages(folder))
    assert "swordfish" not in texts and "Hidden" not in texts and "b{}" not in texts
    assert read_passages(folder / "hours.md")[0].file == "hours.md"


def test_folders_without_text_or_with_too_much_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no file or folder"):
        read_passages(tmp_path / "none")
    with pytest.raises(InputError, match="has no text"):
        read_passages(tmp_path)
    with (tmp_path / "big.txt").open("wb") as big:
        big.truncate(9 << 20)
    with pytest.raises(InputError, match="more than 8 MiB"):
        read_passages(tmp_path)


def test_passages_have_a_bounded_length_and_keep_all_words():
    text = "One sentence of some words. " * 200 + "\n\n" + "中" * 3000 + "\n\nlast"
    passages = split_passages(text)
    assert max(map(len, passages)) <= 700 + len("\n\nlast") and passages[-1].endswith("last")
    assert "".join("".join(passages).split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["<script" * 30_000, "<" * 200_000, "<!--" * 50_000 + "a", "<a>" * 60_000])
def test_markup_is_removed_in_linear_time(text):
    began = time.process_time()
    without_markup(text)
    assert time.process_time() - began < 2


async def test_requests_to_a_named_address(site):
    tool = http_request([site])
    assert await output(tool, url=f"{site}/a b?q=ä&r=1") == "Status 200.\nGET /a%20b?q=%C3%A4&r=1"
    posted = await output(tool, url=f"{site}/post", method="POST", body='{"a": 1}')
    assert posted == 'Status 201.\napplication/json: {"a": 1}'
    assert await output(tool, url=f"{site}/html") == "Status 200.\n  Hello <there> "
    assert await output(tool, url=f"{site}/to?/found") == "Status 200.\nGET /found"
    assert "image/png" in await output(tool, url=f"{site}/picture")


async def test_a_long_response_is_cut_and_a_compressed_one_refused(site):
    tool = http_request([site])
    assert len(await output(tool, url=f"{site}/big")) < http_tool.MAX_BODY_BYTES + 50
    with pytest.raises(InputError, match="compressed"):
        await output(tool, url=f"{site}/zip")


async def test_a_server_that_drips_is_left_and_its_connection_closed(site):
    with pytest.raises(InputError, match=r"within 0\.3 s"):
        await output(http_request([site], max_seconds=0.3), url=f"{site}/slow")
    async with asyncio.timeout(20):
        while any("process_request" in each.name for each in threading.enumerate()):  # it writes to the connection
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1/", "https://example.org/", "file:///etc/passwd", "ftp://127.0.0.1/", "not a url", "//x"),
        *("{site}@example.org/", "http://user@{host}/", "{site}/../x", "{site}/%2e%2e/x", "{site}/%252e%252e/x"),
        *("{site}\\x", "http://[::1/", "{site}/to?http://127.0.0.1:1/", "{site}/to?https://example.org/"),
        *("{site}/to?//169.254.169.254/latest", "{site}/to?/to?/to?/to?/to?/end", "{site}/#part"),
    ],
)
async def test_other_addresses_are_refused_also_as_redirects(site, url):
    tool = http_request([site])
    with pytest.raises(InputError, match=r"not allowed|redirects more"):
        await output(tool, url=url.format(site=site, host=site.removeprefix("http://")))


async def test_names_that_lead_into_the_private_network_are_refused(site, monkeypatch):
    port = int(site.rpartition(":")[2])
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(http_tool.socket, "getaddrinfo", lambda *_, **__: resolved)
    tool = http_request([f"http://public.example:{port}"])
    with pytest.raises(InputError, match="private network"):
        await output(tool, url=f"http://public.example:{port}/")
    monkeypatch.undo()
    named = http_request([site, "http://public.example"])
    assert (await output(named, url=f"{site}/x")).endswith("GET /x"), "the operator named this address"
    for address in ("10.0.0.1", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1", "0.0.0.0"):
        with pytest.raises(InputError, match="private network"):
            CheckedConnection(address, 80, 1, False, may_be_private=False).connect()


async def test_a_server_that_is_not_there_is_an_error_for_the_model():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(InputError, match="the request failed: ConnectionRefusedError"):
            await output(http_request([url]), url=f"{url}/")


class TopicEmbedder:
    """Vectors by topic: cars and garages are alike, whatever they are called."""

    def embed(self, texts):
        topics = (("car", "garage", "vehicle"), ("breakfast", "coffee"))
        counts = [[sum(word in text.lower() for word in topic) for topic in topics] for text in texts]
        return np.array([np.array(each, np.float32) / max(1.0, float(np.hypot(*each))) for each in counts])


def test_passages_are_found_by_their_words_and_by_what_they_say():
    texts = ["The garage is behind the house.", "Coffee is served at seven.", "Ask for the keys at the desk."]
    passages = [Passage("a.md", text) for text in texts]
    words, both = PassageIndex(passages), PassageIndex(passages, TopicEmbedder())
    assert words.search("vehicle") == [] and both.search("vehicle") == passages[:1]
    assert both.search("breakfast keys") in (passages[1:], passages[:0:-1])
    assert both.search("swimming") == []


def test_tools_are_selected_by_name(folder):
    chosen = selected_tools(("clock=Asia/Shanghai", "calculator", f"folder={folder}", "hang-up", "http=a.org,b.org"))
    names = ["current_time", "calculate", "search_documents", "hang_up", "http_request"]
    assert [tool.name for tool in chosen] == names
    assert "https://a.org, https://b.org" in chosen[-1].description
    for bad in ("weather", "folder", "folder=", "http", "calculator=1", "http=a b", "http=http://:80", "clock=Mars"):
        with pytest.raises(InputError):
            selected_tools((bad,))
    with pytest.raises(InputError, match="folder=DIR"):
        selected_tools(("calculator",), "all-minilm-l6-v2")


@pytest.mark.published
@pytest.mark.full
async def test_a_published_model_finds_a_passage_without_a_common_word(published_model, tmp_path):
    (tmp_path / "house.md").write_text("The garage is behind the building.\n\n" + "Rooms are quiet. " * 50)
    (tmp_path / "food.md").write_text("Breakfast is served from seven to ten.")
    (search,) = selected_tools((f"folder={tmp_path}",), str(published_model("all-minilm-l6-v2")))
    assert "garage" in (await output(search, query="Where can I leave my car?")).split("[")[1]
