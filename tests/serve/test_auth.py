import base64
import secrets

import httpx
import pytest
from engine_models import PROMPTS
from serving import NAME, SAMPLING, running_server

from serve.api.service import ServerConfig

KEYS = ("first key", "schlüssel:2")
PATHS = ("/health", "/metrics", "/docs", "/openapi.json", "/version", "/load", "/ping", "/no/such/page")


@pytest.fixture(scope="module")
def running():
    with running_server(config=ServerConfig(model_names=(NAME,), api_keys=KEYS), is_warm=False) as running:
        yield running


def bearer(key):
    return {"Authorization": b"Bearer " + key.encode()}


def basic(key, user="anybody"):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


@pytest.mark.parametrize("path", PATHS)
def test_nothing_answers_without_a_key(running, path):
    response = running.client.get(path)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "AuthenticationError"
    challenges = response.headers.get_list("WWW-Authenticate")
    assert [challenge.split()[0] for challenge in challenges] == ["Basic", "Bearer"]
    assert response.headers["X-Weight-Version"] == "0"


@pytest.mark.parametrize(
    "header",
    [
        bearer("second key"),
        bearer("first ke"),
        bearer("first key2"),
        {"Authorization": b"Bearer"},
        basic("first"),
        basic("", user="first key"),
        {"Authorization": "Basic %%%"},
        {"Authorization": "Basic"},
        {"Authorization": "first key"},
        {"Authorization": "Digest first key"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"Authorization": b"Basic \xff\xfe"},
        {"X-Api-Key": "first key"},
    ],
)
def test_other_keys_are_refused(running, header):
    assert running.client.get("/version", headers=header).status_code == 401
    body = {"token_ids": PROMPTS[2], "sampling_params": SAMPLING}
    assert running.client.post("/inference/v1/generate", json=body, headers=header).status_code == 401
    assert running.service.engine.num_open == 0


@pytest.mark.parametrize("key", KEYS)
def test_each_key_lets_in_both_ways(running, key):
    for header in (bearer(key), basic(key), {"authorization": b"bearer   " + key.encode()}):
        assert running.client.get("/version", headers=header).status_code == 200
    assert running.client.get("/no/such/page", headers=bearer(key)).status_code == 404


def test_a_browser_with_the_key_as_password_is_let_in(running):
    with httpx.Client(base_url=running.url, auth=("", KEYS[0])) as client:
        assert client.get("/docs").status_code == 200


def test_keys_that_nobody_has_are_refused_for_any_bytes(running):
    for size in range(1, 40):
        # Without control characters, which no header may have.
        junk = bytes(byte | 0x80 for byte in secrets.token_bytes(size))
        for scheme in (b"Bearer ", b"Basic ", b""):
            assert running.client.get("/version", headers={"Authorization": scheme + junk}).status_code == 401


@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-origin", 200), ("none", 200), (None, 200)])
def test_pages_of_other_sites_cannot_ask_for_anything(running, site, status):
    """A browser would send the key that it remembers with them."""
    headers = basic(KEYS[0]) | ({} if site is None else {"Sec-Fetch-Site": site})
    assert running.client.post("/ping", headers=headers).status_code == status
    assert running.client.get("/health", headers=headers).status_code == 200
    assert running.client.head("/health", headers=headers).status_code == 200
