# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The page of a server: it loads nothing from elsewhere, and its script holds a conversation."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
import torch

from mcore_inference import LoraSlots
from mcore_inference.server import InferenceServer, serve
from mcore_parallel.data import ByteTokenizer
from tests.support.adapters import random_adapter
from tests.support.browser import Page as BrowserPage
from tests.support.programs import lacking

Make = Callable[..., Any]


class Letters(ByteTokenizer):
    """Whatever a random model draws is a letter."""

    @property
    def eod(self) -> None:
        return None

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(ord("a") + number % 26) for number in ids)


@pytest.fixture(scope="module")
def server(make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    slots = LoraSlots(max_loras=2, max_lora_rank=2)
    engine = make_engine(model, Letters(), max_sequence_length=2048, num_blocks=512, lora=slots)
    for number, name in enumerate(("sql", "chat")):
        engine.load_lora(name, random_adapter(model, 2, number))
    with serve(engine, token="secret") as running:
        yield running


@pytest.fixture(scope="module")
def answer(server: InferenceServer) -> httpx.Response:
    """Fetched without the token."""
    return httpx.get(server.url)


class Page(HTMLParser):
    """Elements with their attributes, and the text of the inline ones."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.labelled: set[str | None] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if "label" in self.open:
            self.labelled.add(dict(attrs).get("id"))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


@pytest.fixture(scope="module")
def page(answer: httpx.Response) -> Page:
    return Page(answer.text)


def test_the_page_names_no_other_place_and_its_policy_lets_nothing_else_run(answer: httpx.Response, page: Page) -> None:
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|wss?:|[\"'(]\s*//|@import|url\(|import\(|importScripts|eval\(|innerHTML", answer.text)
    targets = [
        value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href", "action", "srcset")
    ]
    assert targets == ["data:,"] and not page.open
    assert set(re.findall(r"fetch\(\"([^\"]*)\"", page.texts["script"])) == {"v1/models", "v1/chat/completions"}
    policy = answer.headers["content-security-policy"]
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    # Handlers and styles in attributes would not run under that policy.
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on") or name == "style"]


def test_the_page_fits_a_narrow_screen_and_names_its_controls(page: Page) -> None:
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    style = page.texts["style"]
    assert not [size for size in re.findall(r"width:\s*(\d+)px", style) if int(size) > 390]
    # Of 390 px; a rem is 16 px.
    assert all(float(size) * 16 < 300 for size in re.findall(r"(?:min-width: |minmax\()([\d.]+)rem", style))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    used = set(re.findall(r"byId\(\"(\w+)\"\)", page.texts["script"])) | {"temperature", "top_p", "max_tokens", "seed"}
    assert len(set(ids)) == len(ids) and used <= set(ids)
    controls = {attributes["id"] for tag, attributes in page.elements if tag in ("input", "textarea")}
    assert controls and controls <= page.labelled


BROWSER = """
const [base, script, inputs] = JSON.parse(require("fs").readFileSync(0, "utf8"));
class Element {
  constructor() {
    Object.assign(this, { value: "", textContent: "", children: [], listeners: {}, scrollHeight: 0, scrollTop: 0, clientHeight: 0 });
  }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  scrollIntoView() {}
  focus() {}
}
const elements = {};
const byId = (id) => (elements[id] ??= new Element());
globalThis.document = { getElementById: byId, createElement: () => new Element() };
const direct = globalThis.fetch;
globalThis.fetch = (path, init) => direct(`${base}/${path}`, init);
const transcript = () => byId("chat").children.map((one) => [one.className, one.children[1].textContent]);
const until = async (done) => { while (!done()) await new Promise((resolve) => setTimeout(resolve, 5)); };
(async () => {
  new Function(script)();
  await until(() => byId("status").textContent);
  const out = [[byId("status").textContent, byId("settings").open]];
  byId("token").value = "secret";
  byId("token").listeners.change();
  await until(() => byId("model").textContent);
  out.push([byId("model").textContent, byId("adapters").children.map((one) => one.value)]);
  for (const [values, stops] of inputs) {
    for (const [id, value] of Object.entries(values)) byId(id).value = value;
    const submission = byId("form").listeners.submit({ preventDefault() {} });
    if (stops) {
      await until(() => transcript().at(-1)[1]);
      byId("stop").listeners.click();
    }
    await submission;
    out.push([transcript(), byId("status").textContent, byId("send").disabled, byId("prompt").value]);
  }
  byId("clear").listeners.click();
  out.push(transcript());
  console.log(JSON.stringify(out));
})();
"""


def test_the_script_streams_a_conversation(server: InferenceServer, page: Page) -> None:
    if shutil.which("node") is None:
        lacking("needs node, which runs the script of the page")
    settings = {"temperature": "0.5", "seed": "3", "max_tokens": "6", "system": "be brief"}
    inputs = [
        [{"prompt": "one", **settings}, False],
        [{"prompt": "two", "top_p": "0.9"}, False],
        [{"prompt": "x", "max_tokens": "0"}, False],
        [{"prompt": "x", "max_tokens": "6", "adapter": " sql "}, False],
        [{"prompt": "x", "adapter": "none such"}, False],
    ]
    inputs.append([{"prompt": "three", "max_tokens": "1800", "adapter": ""}, True])
    payload = json.dumps([server.url, page.texts["script"], inputs])
    completed = subprocess.run(["node", "-e", BROWSER], input=payload, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 0, completed.stderr
    refused, names, first, second, wrong, adapted, unknown, stopped, cleared = json.loads(completed.stdout)
    assert refused == ["the bearer token is missing or wrong", True] and names == ["mcore", ["sql", "chat"]] and cleared == []

    messages = [{"role": "system", "content": "be brief"}]

    def ask(prompt: str, **more: Any) -> str:
        messages.append({"role": "user", "content": prompt})
        body = {"messages": messages, "temperature": 0.5, "seed": 3, "max_tokens": 6, **more}
        completion = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer secret"}).json()
        messages.append(completion["choices"][0]["message"])
        return completion["choices"][0]["message"]["content"]

    expected = [["user", "one"], ["assistant", ask("one")], ["user", "two"], ["assistant", ask("two", top_p=0.9)]]
    assert first[0] == expected[:2] and second[0] == expected and not second[2]
    assert re.fullmatch(r"\d+ \+ 6 tokens, \d+ a second", first[1])
    assert wrong[0][-1][0] == "error" and "max_tokens" in wrong[0][-1][1] and wrong[2:] == [False, "x"]
    answer = ask("x", top_p=0.9, model="sql")
    assert adapted[0][-1] == ["assistant", answer]
    assert unknown[0][-1][0] == "error" and "model='none such' is not served here" in unknown[0][-1][1]
    assert stopped[0][-1][0] == "assistant" and stopped[1:] == ["stopped", False, ""]


@pytest.mark.journey
@pytest.mark.timeout(120)
def test_a_phone_without_a_network_holds_a_conversation(server: InferenceServer) -> None:
    """In a real browser, under the page's own policy, of the width of a phone."""
    body = {"model": "", "temperature": 0.5, "seed": 3, "max_tokens": 6, "messages": [{"role": "user", "content": "one"}]}
    completion = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": "Bearer secret"}).json()
    with BrowserPage(390, 844) as phone:
        phone.call("Page.navigate", url=server.url)
        # The token is missing: the page says so and opens its settings.
        assert "bearer token" in phone.until("document.getElementById('status')?.textContent")
        assert phone.run("document.getElementById('settings').open") is True
        for element, text in {"token": "secret", "temperature": "0.5", "seed": "3", "max_tokens": "6"}.items():
            phone.type(element, text)
        assert phone.until("document.getElementById('model').textContent") == "mcore"
        phone.type("prompt", "one")
        phone.tap("send")
        phone.until("document.getElementById('status').textContent", lambda text: "tokens" in text)
        transcript = "[...document.querySelectorAll('article')].map(one => [one.className, one.querySelector('span').textContent])"
        assert phone.run(transcript) == [["user", "one"], ["assistant", completion["choices"][0]["message"]["content"]]]
        phone.type("prompt", "two")
        phone.type("max_tokens", "1800")
        phone.tap("send")
        phone.until(f"{transcript}[3]?.[1]")
        phone.tap("stop")
        assert phone.until("document.getElementById('status').textContent") == "stopped"
        # Readable without sideways scrolling or zooming: nothing is wider than the screen, no text too small, no button too low.
        assert phone.run("document.documentElement.scrollWidth") == 390
        assert phone.run("[...document.querySelectorAll('*')].filter(one => one.getBoundingClientRect().right > 390.5).length") == 0
        least = "Math.min(...[...document.querySelectorAll('{}')].map(one => {}))"
        assert phone.run(least.format("p, article, label, button, summary", "parseFloat(getComputedStyle(one).fontSize)")) >= 12.5
        assert phone.run(least.format("button, input", "one.getBoundingClientRect().height")) >= 44
        phone.tap("clear")
        assert phone.run(transcript) == []
        reports = phone.events
    urls = [report["params"]["request"]["url"] for report in reports if report["method"] == "Network.requestWillBeSent"]
    assert len(urls) > 3 and all(url.startswith((server.url, "data:")) for url in urls)
    # A violation of the policy would be an entry, as an error of the script would; the refused token is one.
    entries = [report["params"]["entry"] for report in reports if report["method"] == "Log.entryAdded"]
    assert all("401" in entry["text"] for entry in entries if entry["level"] == "error"), entries
    assert not [report for report in reports if report["method"] == "Runtime.exceptionThrown"]
