"""SGLang's own API key: made if the run authenticates, known only to its generation server, and not readable anywhere."""

import aiohttp
import psutil
import pytest

from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import AttachedServer, own_server, read_api_key
from asyncrl.runtime.security import Secrets, Security
from tests.support.process_wide import secured_by

START_S = 240.0


async def test_a_server_of_a_run_that_authenticates_asks_for_its_key(store, sglang_config, tmp_path):
    log = tmp_path / "sglang.log"
    with secured_by(Security(Secrets.make())):
        server = own_server(sglang_config, str(store.model_path), tensor=1, seed=1, log=log)
    client = SGLangClient("", server.api_key)

    async def is_ready(url):
        client.url = url
        try:
            await client.info(limit_s=5.0)
        except ServerError:
            return False
        return True

    try:
        await server.start(is_ready, START_S)
        async with aiohttp.ClientSession() as stranger:
            for path in ("/model_info", "/server_info", "/v1/models"):
                async with stranger.get(f"{server.url}{path}") as answer:
                    assert answer.status == 401
            async with stranger.post(f"{server.url}/generate", json={"input_ids": [1]}) as answer:
                assert answer.status == 401
        key = server.api_key
        assert len(key) > 30
        shown = log.read_text()
        assert "api_key" in shown  # SGLang prints its arguments
        assert key not in shown
        for process in (psutil.Process(server.pid), *server.children):
            assert key not in " ".join(process.cmdline())
            assert key not in str(process.environ())
    finally:
        await client.close()
        await server.close()


def test_the_key_of_somebody_elses_server_is_in_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("abc\n")
    assert AttachedServer("http://h:1", read_api_key(str(file))).api_key == "abc"
    assert read_api_key("") == ""
    with pytest.raises(ConfigError, match=r"generation\.api_key_file="):
        read_api_key(str(tmp_path / "none"))


def test_a_config_file_of_the_users_has_no_place_beside_the_key(tmp_path):
    config = GenerationConfig(server_args={"config": "mine.yaml"})
    with (
        secured_by(Security(Secrets.make())),
        pytest.raises(ConfigError, match=r"server_args\.config='mine.yaml'"),
    ):
        own_server(config, str(tmp_path), tensor=1, seed=1, log=tmp_path / "log")
