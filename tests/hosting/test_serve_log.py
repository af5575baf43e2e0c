"""`viva serve --log-level … --log-format …`: the whole of stderr is a log in that format."""

import json
import re

import httpx
import pytest

from tests.hosting.processes import viva_serve
from tests.s2s.small_parts import small_asr
from vivavoce.errors import InputError
from vivavoce.server.hosting.config import read_serving_options


@pytest.mark.parametrize("format", ["json", "text"])
@pytest.mark.full
def test_every_line_on_stderr_is_in_the_format_that_was_asked_for(tmp_path, format):
    (tmp_path / "asr").mkdir()
    config = f'asr = "{small_asr(tmp_path / "asr")}"\naudio_only = true\n[server]\nlog_level = "debug"\n'
    (tmp_path / "serve.toml").write_text(config, encoding="utf8")
    log = tmp_path / "log"
    with viva_serve("--config", str(tmp_path / "serve.toml"), "--log-format", format, log=log) as address:
        assert httpx.get(f"http://{address}/v1/models/none").status_code == 404
        sent = {"file": ("a.wav", b"not a sound: xyzzy")}
        answer = httpx.post(f"http://{address}/v1/audio/transcriptions", files=sent, data={"model": "xyzzy"})
        assert answer.status_code == 400
    lines = log.read_text(encoding="utf8").splitlines()
    if format == "json":
        messages = [json.loads(line)["message"] for line in lines]
    else:
        matched = [re.fullmatch(r"[\d-]+T[\d:.]+Z [A-Z]+ [\w.]+: (.*)", line) for line in lines]
        assert all(matched), lines
        messages = [match[1] for match in matched]
    plain = [re.sub(r" \(req_[0-9a-f]{32}\)", " (req)", message) for message in messages]
    assert "GET /v1/models/{id:path} (req) was refused: model_not_found" in plain
    assert any(message.startswith("POST /v1/audio/transcriptions (req) was refused") for message in plain)
    assert "xyzzy" not in "".join(lines)


@pytest.mark.parametrize("wrong", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_a_level_or_format_that_does_not_exist_is_one_line(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be one of"):
        read_serving_options(None, {"server": wrong})
