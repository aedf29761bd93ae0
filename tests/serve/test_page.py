import contextlib
import itertools
import math
import re
import time

import pytest
from engine_models import MODEL, PIECES, V, Words
from playwright.sync_api import expect
from serving import running_server

from serve.api.page import PAGE, _pieces, page_headers
from serve.colours import BANDS

# What a model may write, and what must not come of it.
HOSTILE = {
    "DEF": "<img src=x onerror=\"document.title='taken'\">",
    "G": "</span><script>document.title='taken'</script>",
    "HI": "\u202e",
    "J": "\n\n",
}


class Endless(Words):
    eos_token_ids = ()


TOKENIZER = Endless(*(HOSTILE.get(piece, piece) for piece in PIECES))
MAX_TOKENS, SEED = 48, 2**64 - 3
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0, "max_tokens": MAX_TOKENS, "seed": SEED}


@pytest.fixture(scope="module")
def running():
    with running_server(tokenizer=TOKENIZER, is_warm=False, max_logprobs=5) as running:
        yield running


@contextlib.contextmanager
def opened(browser, url, *, may_complain=False, **options):
    """The page; at the end, nothing was asked of anybody else, and the console holds no complaint."""
    asked, complaints = [], []
    with contextlib.closing(browser.new_context(**options)) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if message.type != "info" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        expect(page.locator("#model")).to_contain_text(" ids ")
        yield page
    assert asked
    assert all(address.startswith((url + "/", "data:")) for address in asked), asked
    assert may_complain or not complaints, complaints


def generate(page, prompt="abc", **fields):
    page.fill("#prompt", prompt)
    for name, value in {"max_tokens": MAX_TOKENS, "seed": SEED, **fields}.items():
        page.fill(f"#{name}", str(value))
    page.keyboard.press("Control+Enter")


def ended(page):
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)
    return page.locator("#tokens .t")


def asked_of_server(running, prompt, **fields):
    """The answer that the page has been given."""
    (choice,) = running.generate(prompt, sampling_params={**SAMPLING, "logprobs": 5, **fields})["choices"]
    return choice


def test_the_page_allows_nothing_but_itself(running):
    response = running.client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.text == PAGE.read_text(encoding="utf-8")
    markup = re.sub(r"<(script|style)>.*?</\1>", "", response.text, flags=re.DOTALL)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\son\w+=|style=", markup)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?:", PAGE.read_text().split("<script>")[1]
    )


def test_another_script_has_another_hash():
    one, other = (page_headers(f"<style>a</style><script>{text}</script>") for text in ("1", "2"))
    assert one["Content-Security-Policy"] != other["Content-Security-Policy"]


def test_its_bands_are_those_of_the_terminal():
    most = ", ".join("Infinity" if most == math.inf else str(most) for most, *_ in BANDS)
    assert f"const MOST = [{most}]" in PAGE.read_text()


def test_prompts_become_ids(running):
    def ids_of(**body):
        return running.client.post("/page/prompt", json=body).json()["token_ids"]

    assert ids_of(text="abc") == [1, 3, 4, 5]
    assert ids_of(text="a", chat=True) == TOKENIZER.encode("<|bos|>u:a;a:")


def test_ids_become_texts(running):
    def texts_of(status=200, **body):
        response = running.client.post("/page/texts", json=body)
        assert response.status_code == status, response.text
        return response.json()

    assert texts_of(token_ids=[3, 1, 4]) == {"texts": ["a", "<|bos|>", "b"]}
    assert texts_of(token_ids=[3, 4], after=[5], is_last=True) == {"texts": ["a", "b"]}
    for wrong in (-1, V, 2**70):
        assert texts_of(400, token_ids=[wrong])["error"]["param"].startswith("token_ids")
    assert texts_of(400, token_ids=[3], after=[V])["error"]["message"] == f"token_ids must be in [0, {V}), got {V}."


def test_parts_of_characters_wait_for_the_last():
    halves = Words("a", b"\xf0\x9f", b"\x98\x80")
    assert _pieces(halves, [0], [1, 2, 0], is_last=False) == ["", "\U0001f600", "a"]
    assert _pieces(halves, [0, 1], [2], is_last=True) == ["\U0001f600"]
    assert _pieces(halves, [], [0, 1], is_last=True) == ["a", "\ufffd"]


def test_tokens_have_the_colours_of_their_supports(running, chromium):
    with opened(chromium, running.url) as page:
        page.uncheck("#chat")
        generate(page)
        tokens = ended(page)
        choice = asked_of_server(running, [1, 3, 4, 5])
        counts = [len(ids) for ids in choice["sampling_mask"]]
        assert tokens.count() == len(counts) == MAX_TOKENS
        assert page.evaluate("tokens.map((token) => token.id)") == choice["token_ids"]
        bands = [next(i for i, (most, *_) in enumerate(BANDS, 1) if count <= most) for count in counts]
        shown = tokens.evaluate_all("all => all.map((token) => [Number(token.dataset.band), token.dataset.n ?? '1'])")
        assert shown == [[band, str(count)] for band, count in zip(bands, counts, strict=True)]
        assert len(set(bands)) > 2
        summary = page.inner_text("#summary").split("\n")
        assert {"length", f"{sum(counts) / len(counts):.1f}", str(max(counts)), "tokens/s"} <= set(summary)


def test_a_token_shows_what_it_was_drawn_from(running, chromium):
    with opened(chromium, running.url) as page:
        page.uncheck("#chat")
        generate(page)
        tokens = ended(page)
        choice = asked_of_server(running, [1, 3, 4, 5])
        place = max(range(MAX_TOKENS), key=lambda place: len(choice["sampling_mask"][place]))
        tokens.nth(place).hover()
        expect(page.locator("#about")).to_contain_text(f"Token {place + 1},")
        kept, entry = choice["sampling_mask"][place], choice["logprobs"]["content"][place]
        ids = [int(text) for text in page.locator("#kept .id").all_inner_texts()]
        told = {top["token_id"]: math.exp(top["logprob"]) for top in entry["top_logprobs"]}
        assert ids == sorted(told, key=told.get, reverse=True)
        shares = [float(text.removesuffix(" %")) for text in page.locator("#kept .value").all_inner_texts()]
        assert shares == pytest.approx([100 * told[token_id] for token_id in ids], abs=0.06)
        assert page.locator("#kept .drawn .id").inner_text() == str(choice["token_ids"][place])
        rest = len(kept) - len(told)
        assert rest > 0
        assert page.locator("#rest span").count() == rest
        assert f"{rest} further ids, together" in page.inner_text("#rest-title")
        assert f"drawn from {len(kept)} ids" in page.inner_text("#about")

        tokens.first.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#about")).to_contain_text("Token 2,")
        assert tokens.nth(1).get_attribute("aria-selected") == "true"
        assert page.evaluate("document.activeElement.dataset.index") == "1"
        page.keyboard.press("End")
        expect(page.locator("#about")).to_contain_text(f"Token {MAX_TOKENS},")


def test_what_a_model_writes_stays_text(running, chromium):
    with opened(chromium, running.url) as page:
        generate(page, temperature=2, top_p=1, top_k=V)
        tokens = ended(page)
        written = tokens.evaluate_all("all => all.map((token) => token.firstChild?.textContent ?? '')")
        assert HOSTILE["DEF"] in written or HOSTILE["G"] in written
        for place in range(0, tokens.count(), 7):
            tokens.nth(place).hover()
            expect(page.locator("#about")).to_contain_text(f"Token {place + 1},")
            assert page.locator("#detail img, #detail script").count() == 0
        assert page.locator("img, body script ~ script, #tokens script").count() == 0
        assert page.title() == "jaxmask"
        # What turns the direction of writing is written out.
        assert "\u202e" not in page.inner_text("body")


def test_errors_are_shown_in_the_servers_words(running, chromium):
    with opened(chromium, running.url, may_complain=True) as page:
        generate(page, top_k=0)
        page.wait_for_selector("#error:visible")
        assert "requires top_k > 0" in page.inner_text("#error")
        generate(page, top_k="<img src=x onerror=1>")
        expect(page.locator("#error")).to_contain_text("<img src=x")
        assert page.locator("#error img").count() == 0
        generate(page, top_k=5)
        assert ended(page).count() == MAX_TOKENS
        assert page.is_hidden("#error")
        page.route("**/inference/v1/generate", lambda route: route.abort())
        generate(page)
        page.wait_for_selector("#error:visible")
        assert page.inner_text("#error") == "The server does not answer."


def test_stop_ends_the_request(running, chromium, monkeypatch):
    engine = running.service.engine.engine
    step = engine.step

    def slow():
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    with opened(chromium, running.url, may_complain=True) as page:
        generate(page)
        page.wait_for_selector("#tokens .t")
        page.click("#stop")
        tokens = ended(page)
        assert "stopped by you" in page.inner_text("#summary")
        assert 0 < tokens.count() < MAX_TOKENS
        running.wait_until_idle()


def luminance(colour):
    values = [float(value) / 255 for value in re.findall(r"[\d.]+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_on_every_band(running, chromium, scheme):
    """At WCAG's 4.5; and brightness alone, which everybody sees, orders the bands."""
    with opened(chromium, running.url, color_scheme=scheme) as page:
        text = luminance(page.evaluate("getComputedStyle(document.body).color"))
        card = page.evaluate("getComputedStyle(document.getElementById('form')).backgroundColor")
        swatches = page.locator(".swatch i").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor)"
        )
        grounds = [luminance(colour) for colour in (card, *swatches[1:])]
        assert len(grounds) == len(BANDS)
        for ground in grounds:
            assert (max(text, ground) + 0.05) / (min(text, ground) + 0.05) > 4.5
        distances = [abs(ground - text) for ground in grounds]
        assert all(near < far for far, near in itertools.pairwise(distances))


def test_it_fits_a_telephone(running, chromium):
    with opened(chromium, running.url, viewport={"width": 390, "height": 844}) as page:
        generate(page)
        ended(page).nth(3).click()
        page.wait_for_selector("#kept li")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.click("#close")
        assert page.is_hidden("#detail")


def test_ids_alone_and_no_masks(chromium):
    settings = {"return_sampling_mask": False, "logprobs_mode": "raw_logprobs"}
    with running_server(MODEL, None, is_warm=False, **settings) as running, opened(chromium, running.url) as page:
        assert "without --return-sampling-mask" in page.inner_text("#notice")
        assert page.is_hidden("#chat")
        generate(page, "3, 4 [5]", max_tokens=4)
        tokens = ended(page)
        choice = asked_of_server(running, [3, 4, 5], max_tokens=4)
        assert [text.strip() for text in tokens.all_inner_texts()] == [str(token) for token in choice["token_ids"]]
        assert page.locator("#tokens [data-band]").count() == 0
        tokens.first.hover()
        page.wait_for_selector("#kept li")
        assert "of the whole vocabulary" in page.inner_text("#about")
        generate(page, "3 four")
        page.wait_for_selector("#error:visible")
        assert "four is none" in page.inner_text("#error")
