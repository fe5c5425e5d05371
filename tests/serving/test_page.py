"""The chat page in a real browser, driven by its own debugging protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.serving.tiny_server import DEADLINE_S, NAME, model, running, service, until

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PAGE = Path(__file__).parents[2] / "rllib_llm" / "serving" / "page.html"


def test_the_page_names_no_foreign_host():
    text = PAGE.read_text(encoding="utf-8")
    assert "http://" not in text and "https://" not in text and "src=" not in text


NODE = shutil.which("node")
# The page's elements, and a server that refuses the first request.
STUBS = """
const element = () => ({ append() {}, replaceChildren() {}, addEventListener() {}, value: "1" });
globalThis.document = { getElementById: element, createElement: element };
globalThis.Option = class {};
let refuses = true;
const event = 'data: {"model": "m", "choices": [{"delta": {"content": "Hi"}}]}\\n';
globalThis.fetch = async () => refuses
  ? { ok: false, json: async () => ({ error: { message: "The server is full." } }) }
  : { ok: true, body: new Response(event).body, json: async () => ({ data: [] }) };
"""
ASKS = """
(async () => {
  await ask(0, "m", "lost");
  refuses = false;
  await ask(0, "m", "kept");
  console.log(JSON.stringify(histories[0]));
})();
"""


@pytest.mark.skipif(not NODE, reason="there is no Node.js here")
def test_a_turn_that_failed_is_not_in_the_chat(tmp_path):
    script = PAGE.read_text(encoding="utf-8").partition("<script>")[2].partition("</script>")[0]
    file = tmp_path / "page.js"
    file.write_text(STUBS + script.replace('"use strict";', "") + ASKS, encoding="utf-8")
    told = subprocess.run([NODE, file], capture_output=True, text=True, timeout=DEADLINE_S)
    assert json.loads(told.stdout) == [
        {"role": "user", "content": "kept"}, {"role": "assistant", "content": "Hi"}
    ], told.stderr  # fmt: skip


class Tab:
    """One page of a browser."""

    def __init__(self, connection) -> None:
        self._connection, self._ids = connection, itertools.count(1)

    async def call(self, method: str, **params):
        number = next(self._ids)
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(await self._connection.recv())).get("id") != number:
            pass
        return answer["result"]

    async def value(self, expression: str):
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        return (await self.call("Runtime.evaluate", **asked))["result"].get("value")

    async def until(self, expression: str) -> None:
        while not await self.value(expression):
            await asyncio.sleep(0.02)


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium here")
def test_a_chat_streams_stops_compares_and_colours(tmp_path):
    websockets = pytest.importorskip("websockets")
    made = service()
    with running(made) as address:
        made.load(model(1).state_dict(), epoch=0, version=1, source="test")
        browser = subprocess.Popen(
            [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={tmp_path}", f"{address}/"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = tmp_path / "DevToolsActivePort"
            until(lambda: port_file.is_file() and port_file.read_text().count("\n"))
            port = port_file.read_text().split("\n")[0]

            def tab_url() -> str | None:
                tabs = httpx.get(f"http://127.0.0.1:{port}/json").json()
                return next((t["webSocketDebuggerUrl"] for t in tabs if address in t["url"]), None)

            until(lambda: tab_url() is not None)

            async def drive() -> None:
                async with websockets.connect(tab_url()) as connection:
                    await use(Tab(connection), made)

            asyncio.run(asyncio.wait_for(drive(), 2 * DEADLINE_S))
        finally:
            browser.kill()
            browser.wait()


async def use(tab: Tab, made) -> None:
    await tab.until("document.readyState === 'complete' && get('left').length === 3")
    names = await tab.value("[...get('left').options].map(o => o.value)")
    assert names == [NAME, f"{NAME}@0.1", f"{NAME}@0.0"]
    say = "get('text').value = 'Hello'; get('form').requestSubmit();"
    await tab.value(f"get('tokens').value = 12; {say}")
    await tab.until("running === null && histories[0].length === 2")
    assert await tab.value("histories[0][1].content") != ""
    assert await tab.value("document.querySelectorAll('.who')[1].textContent") == f"{NAME}@0.1"
    # Two versions side by side, tokens coloured.
    await tab.value("get('again').click(); get('colours').checked = true")
    await tab.value(f"get('left').value='{NAME}@0.0'; get('right').value='{NAME}@0.1'; {say}")
    await tab.until("running === null && histories[1].length === 2")
    assert await tab.value("get('chat1').hidden") is False
    assert await tab.value("document.querySelectorAll('#chat0 span, #chat1 span').length") >= 4
    assert "log-prob -" in await tab.value("document.querySelector('#chat0 span').title")
    # Stop frees the row.
    made.host.pause()
    await tab.value(f"get('right').value=''; get('tokens').value = 500; {say}")
    while not made.jobs:
        await asyncio.sleep(0.01)
    await tab.value("get('stop').click()")
    while made.jobs:
        await asyncio.sleep(0.01)
    made.host.resume()
    await tab.until("running === null && !get('send').disabled")
