"""Other people's clients against `rllib serve`: a table of what works with which version.

    python -m benchmarks.serving.clients --folder /tmp/clients  # all that can be installed
    python -m benchmarks.serving.clients --folder /tmp/clients openai litellm  # some
    python -m benchmarks.serving.clients --folder /tmp/clients --url http://127.0.0.1:8000/v1  

Each client gets an environment of its own in the folder, made where it is missing: a virtual
environment for Python's, `node_modules` for npm's. The server is `rllib serve --local` with a tiny
random model, or one at `--url` that serves the folder's `model` under the name "tiny" and with the
key "benchmark", such as Ray Serve's. What has to be a call or JSON is guided by the grammar engine,
so that a random model will do. Each check is what the client's own documentation shows. The last
output is the table, in Markdown; the exit code is 1 where a check failed. A client that cannot be
installed stands in the table with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME, KEY = "tiny", "benchmark"
CHAT = [{"role": "user", "content": "1 + 1?"}]
CONTEXT, CONTINUATION = "Once upon", " a time"
SECONDS = 420.0
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools>\nCall as "
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["a", "sign"],
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9},
                   "sign": {"type": "string", "enum": ["+", "-"]}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "x", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}


# --- checks, each in its client's environment ----------------------------------------------------


def ours(made: Any) -> None:
    """Asserts that an object, of the schema above, keeps to it."""
    given = made if isinstance(made, dict) else json.loads(made) if isinstance(made, str) else (
        made.model_dump()
    )  # fmt: skip
    assert set(given) == {"a", "sign"} and 0 <= given["a"] <= 9 and given["sign"] in "+-", given


def pydantic_schema() -> Any:
    """The schema above as a pydantic model."""
    from typing import Literal

    from pydantic import ConfigDict, Field, create_model

    return create_model(
        "Sum", __config__=ConfigDict(extra="forbid"), a=(int, Field(ge=0, le=9)),
        sign=(Literal["+", "-"], ...),
    )  # fmt: skip


def check_openai(url: str, check: Callable) -> None:
    import openai

    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    chat, texts, answers = client.chat.completions, client.completions, client.responses
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 200, "seed": 1}
    once: dict[str, Any] = {"model": NAME, "prompt": CONTEXT, "max_tokens": 8, "seed": 1}
    responses_tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}

    @check("models")
    def _() -> None:
        assert client.models.list().data[0].id == NAME
        assert client.models.retrieve(NAME).id == NAME

    @check("chat, whole and streamed, with usage")
    def _() -> None:
        whole = chat.create(**asked)
        options = {"include_usage": True}
        chunks = list(chat.create(**asked, stream=True, stream_options=options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage

    @check("chat.completions.stream")
    def _() -> None:
        # The helper refuses what its limit of tokens has ended, so the answer is one that ends.
        with chat.stream(**asked, response_format=pydantic_schema()) as stream:
            final = stream.until_done().get_final_completion()
        ours(final.choices[0].message.parsed)

    @check("log-probs, n, stop, penalties, logit_bias")
    def _() -> None:
        made = chat.create(**asked, logprobs=True, top_logprobs=3, n=2, frequency_penalty=0.5,
                           logit_bias={"40": 5}, stop=["~~"])  # fmt: skip
        assert len(made.choices) == 2
        first = made.choices[0].logprobs.content[0]
        assert len(first.top_logprobs) == 3 and first.logprob <= 0

    @check("tools: named, required, parallel off")
    def _() -> None:
        for choice in (NAMED, "required"):
            made = chat.create(
                **asked, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
            ).choices[0]
            assert made.finish_reason == "tool_calls"
            ours(made.message.tool_calls[0].function.arguments)

    @check("a conversation with a tool's result")
    def _() -> None:
        call = chat.create(**asked, tools=[TOOL], tool_choice=NAMED).choices[0].message
        told = [{"role": "tool", "tool_call_id": c.id, "content": "2"} for c in call.tool_calls]
        messages = [*CHAT, call.model_dump(exclude_none=True), *told]
        assert chat.create(**{**asked, "messages": messages}, tools=[TOOL]).choices

    @check("structured output: parse, json_schema, json_object")
    def _() -> None:
        ours(chat.parse(**asked, response_format=pydantic_schema()).choices[0].message.parsed)
        strict = {"name": "sum", "schema": SCHEMA, "strict": True}
        told = {"type": "json_schema", "json_schema": strict}
        ours(chat.create(**asked, response_format=told).choices[0].message.content)
        assert chat.create(**asked, response_format={"type": "json_object"}).choices

    @check("completions: stream, echo, log-probs, best_of refused")
    def _() -> None:
        whole = texts.create(**once)
        chunks = list(texts.create(**once, stream=True))
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
        echoed = texts.create(**{**once, "max_tokens": 0}, echo=True, logprobs=1).choices[0]
        assert echoed.text == CONTEXT and echoed.logprobs.token_logprobs[0] is None
        try:
            texts.create(**once, best_of=3)
        except openai.BadRequestError as error:
            assert error.param == "best_of"
        else:
            raise AssertionError("best_of was taken")

    @check("responses: text, stream, tools, parse")
    def _() -> None:
        short: dict[str, Any] = {"model": NAME, "input": "1 + 1?", "max_output_tokens": 200,
                                 "extra_body": {"seed": 1}}  # fmt: skip
        assert answers.create(**short).output_text
        with answers.stream(**short, text_format=pydantic_schema()) as stream:
            assert [event.type for event in stream][-1] == "response.completed"
            ours(stream.get_final_response().output_parsed)
        *_, last = answers.create(**short, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        forced = {"tool_choice": "required", "parallel_tool_calls": False}
        made = answers.create(**short, tools=[responses_tool], **forced)
        ours(made.output[0].arguments)
        ours(answers.parse(**short, text_format=pydantic_schema()).output_parsed)

    @check("errors as classes: 400, 401, 404")
    def _() -> None:
        for changed, kind in (
            ({"temperature": -1}, openai.BadRequestError), ({"model": "no"}, openai.NotFoundError),
        ):  # fmt: skip
            try:
                chat.create(**{**asked, **changed})
            except kind as error:
                assert error.message and error.request_id
            else:
                raise AssertionError(f"{changed} was taken")
        try:
            client.with_options(api_key="wrong").models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("a wrong key was taken")

    @check("16 asynchronous requests at once")
    def _() -> None:
        async def many() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as several:
                made = [several.chat.completions.create(**asked) for _ in range(16)]
                return await asyncio.gather(*made)

        assert len({made.choices[0].message.content for made in asyncio.run(many())}) == 1


def check_instructor(url: str, check: Callable) -> None:
    import instructor
    import openai

    client = openai.OpenAI(base_url=url, api_key=KEY)
    asked: dict[str, Any] = {"model": NAME, "messages": CHAT, "max_tokens": 200,
                             "response_model": pydantic_schema(), "max_retries": 1}  # fmt: skip
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):

        @check(f"Mode.{mode}")
        def _(mode: str = mode) -> None:
            made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
            ours(made.chat.completions.create(**asked))

    @check("create_partial")
    def _() -> None:
        made = instructor.from_openai(client)
        *_, last = made.chat.completions.create_partial(**asked)
        ours(last)


def check_litellm(url: str, check: Callable) -> None:
    import litellm

    to: dict[str, Any] = {"api_base": url, "api_key": KEY, "max_tokens": 200, "seed": 1}
    model = f"openai/{NAME}"

    @check("completion, whole and streamed")
    def _() -> None:
        whole = litellm.completion(model=model, messages=CHAT, **to)
        chunks = litellm.completion(model=model, messages=CHAT, stream=True, **to)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content and whole.usage.completion_tokens

    @check("tool_choice required, response_format")
    def _() -> None:
        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        made = litellm.completion(model=model, messages=CHAT, **forced, **to)
        ours(made.choices[0].message.tool_calls[0].function.arguments)
        told = pydantic_schema()
        made = litellm.completion(model=model, messages=CHAT, response_format=told, **to)
        ours(made.choices[0].message.content)

    @check("text_completion, hosted_vllm provider, acompletion")
    def _() -> None:
        assert litellm.text_completion(model=f"text-completion-openai/{NAME}", prompt="a", **to)
        assert litellm.completion(model=f"hosted_vllm/{NAME}", messages=CHAT, **to).choices
        assert asyncio.run(litellm.acompletion(model=model, messages=CHAT, **to)).choices

    @check("responses")
    def _() -> None:
        told = {**to, "max_output_tokens": 60}
        del told["max_tokens"], told["seed"]
        assert litellm.responses(model=model, input="1 + 1?", **told).output


def check_langchain(url: str, check: Callable) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    to: dict[str, Any] = {"model": NAME, "base_url": url, "api_key": KEY, "seed": 1}
    chat = ChatOpenAI(max_tokens=120, **to)

    @check("invoke, stream, batch, usage")
    def _() -> None:
        whole = chat.invoke("Hello")
        assert "".join(str(chunk.content) for chunk in chat.stream("Hello")) == whole.content
        assert whole.usage_metadata["output_tokens"] and len(chat.batch(["a", "b"])) == 2

    for method in ("function_calling", "json_schema"):

        @check(f"with_structured_output({method})")
        def _(method: str = method) -> None:
            ours(chat.with_structured_output(pydantic_schema(), method=method).invoke("1 + 1?"))

    @check("bind_tools(tool_choice='any'), and its result")
    def _() -> None:
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = chat.bind_tools([TOOL], tool_choice="any")
        made = bound.invoke("1 + 1?")
        ours(made.tool_calls[0]["args"])
        told = [ToolMessage("2", tool_call_id=call["id"]) for call in made.tool_calls]
        assert bound.invoke([HumanMessage("1 + 1?"), made, *told])

    @check("use_responses_api, whole and streamed")
    def _() -> None:
        named = ChatOpenAI(use_responses_api=True, max_tokens=60, model=NAME, base_url=url,
                           api_key=KEY)  # fmt: skip
        assert named.invoke("Hello").content
        assert list(named.stream("Hello"))

    @check("OpenAI (text completions)")
    def _() -> None:
        assert isinstance(OpenAI(max_tokens=8, **to).invoke("Once"), str)


def check_inspect(url: str, check: Callable) -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import bash

    os.environ.update({"RLLIB_API_KEY": KEY, "RLLIB_BASE_URL": url, "OPENAI_API_KEY": KEY})
    samples = [Sample(input="1 + 1?", target="2"), Sample(input="2 + 2?", target="4")]
    short = GenerateConfig(max_tokens=20, seed=1, logprobs=True, top_logprobs=2)
    for name, model in (
        ("openai-api", f"openai-api/rllib/{NAME}"), ("openai", f"openai/{NAME}"),
    ):  # fmt: skip

        @check(f"a task through the provider {name}")
        def _(name: str = name, model: str = model) -> None:
            made = get_model(model, base_url=url, config=short)
            task = Task(dataset=samples, solver=[generate()], scorer=match())
            (log,) = eval(task, model=made, display="none", log_dir="logs")
            assert log.status == "success", log.error
            assert log.results is not None and log.results.total_samples == 2

    @check("a task with tools")
    def _() -> None:
        made = get_model(f"openai-api/rllib/{NAME}", base_url=url, config=short)
        task = Task(dataset=samples, solver=[use_tools(bash()), generate()], scorer=match())
        (log,) = eval(task, model=made, display="none", log_dir="logs")
        assert log.status == "success", log.error


def check_lm_eval(url: str, check: Callable) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    def instance(kind: str, *arguments: Any) -> Any:
        return Instance(kind, {}, arguments, 0)

    os.environ["OPENAI_API_KEY"] = KEY
    folder, expected = os.environ["CLIENTS_MODEL"], float(os.environ["CLIENTS_LOGPROB"])
    to: dict[str, Any] = {"model": NAME, "tokenizer_backend": "huggingface", "tokenizer": folder}

    @check("log-likelihood as transformers has it, to 1e-4")
    def _() -> None:
        api = LocalCompletionsAPI(base_url=f"{url}/completions", **to)
        ((logprob, is_greedy),) = api.loglikelihood(
            [instance("loglikelihood", CONTEXT, CONTINUATION)]
        )
        assert math.isclose(logprob, expected, abs_tol=1e-4), (logprob, expected)
        assert isinstance(is_greedy, bool)

    until = {"until": ["~~"], "max_gen_toks": 8}

    @check("generate_until, completions")
    def _() -> None:
        api = LocalCompletionsAPI(base_url=f"{url}/completions", **to)
        made = api.generate_until([instance("generate_until", CONTEXT, until)])
        assert len(made) == 1

    @check("generate_until, chat")
    def _() -> None:
        from lm_eval.models.utils import handle_stop_sequences  # noqa: F401  (the chat's module)

        api = LocalChatCompletion(base_url=f"{url}/chat/completions", model=NAME)
        asked = api.apply_chat_template(CHAT)
        assert len(api.generate_until([instance("generate_until", asked, until)])) == 1


def run_tool(*command: str) -> str:
    """The output of a command-line tool of this environment.

    Raises:
        AssertionError: it failed, with its last lines.
    """
    tool = Path(sys.executable).with_name(command[0])
    made = subprocess.run([str(tool), *command[1:]], capture_output=True, text=True)
    told = "\n".join((made.stdout + made.stderr).splitlines()[-15:])
    assert made.returncode == 0, told
    return made.stdout + made.stderr


def check_schemathesis(url: str, check: Callable) -> None:
    @check("no answer of 5xx, all as described, 5 cases of each operation")
    def _() -> None:
        described = url.removesuffix("/v1") + "/openapi.json"
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,"
        run_tool(
            "schemathesis", "run", described, "--max-examples", "5", "--seed", "1",
            "--checks", f"{checks}response_schema_conformance", "--phases", "examples,fuzzing",
            "--request-timeout", "60", "--suppress-health-check", "too_slow",
            "-H", f"Authorization: Bearer {KEY}",
        )  # fmt: skip


def check_guidellm(url: str, check: Callable) -> None:
    target, model = url.removesuffix("/v1"), os.environ["CLIENTS_MODEL"]
    for form in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):

        @check(f"six requests of a load, {form}")
        def _(form: str = form) -> None:
            out = Path("guidellm.json").resolve()
            backend = f"kind=openai_http,target={target},model={NAME},api_key={KEY}"
            run_tool(
                "guidellm", "run", "--backend", f"{backend},request_format={form}",
                "--tokenizer", f"kind=hf_auto,model={model}", "--profile", "kind=synchronous",
                "--constraint", "kind=max_requests,count=6",
                "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
                "--output", f"kind=json,path={out}", "--disable-console-interactive",
            )  # fmt: skip
            (made,) = json.loads(out.read_text())["benchmarks"]
            totals = made["metrics"]["request_totals"]
            assert (totals["successful"], totals["errored"]) == (6, 0), totals


# Name -> what pip installs, and its checks.
PYTHON: dict[str, tuple[list[str], Callable[[str, Callable], None]]] = {
    "openai": (["openai"], check_openai),
    "instructor": (["instructor"], check_instructor),
    "litellm": (["litellm", "mcp"], check_litellm),
    "langchain-openai": (["langchain-openai"], check_langchain),
    "inspect-ai": (["inspect-ai", "openai"], check_inspect),
    "lm-eval": (["lm-eval[api]", "transformers"], check_lm_eval),
    "schemathesis": (["schemathesis"], check_schemathesis),
    "guidellm": (["guidellm"], check_guidellm),
}
NODE = {  # name -> what npm installs
    "openai (npm)": ["openai", "zod"],
    "ai (npm)": ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"],
}


def run_checks(name: str, url: str) -> None:
    """Prints a line of JSON for each check of a client of Python."""

    def check(what: str) -> Callable[[Callable[[], None]], None]:
        def now(run: Callable[[], None]) -> None:
            try:
                run()
                error = None
            except Exception as caught:  # noqa: BLE001  (a client may raise anything)
                error = f"{type(caught).__name__}: {caught}"[:2000]
            print("CHECK " + json.dumps({"what": what, "error": error}), flush=True)

        return now

    PYTHON[name][1](url, check)


# --- the server, and the environments ------------------------------------------------------------


def make_model(folder: Path) -> float:
    """Saves a tiny random model with a tokenizer of bytes, and returns the log-prob of
    `CONTINUATION` behind `CONTEXT`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<|im_end|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=words[0], pad_token=words[0],
        additional_special_tokens=[words[1]], chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
            bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head, tail = (tokenizer(text)["input_ids"] for text in (CONTEXT, CONTINUATION))
    with torch.no_grad():
        logprobs = model(torch.tensor([head + tail])).logits[0].log_softmax(-1)
    return sum(logprobs[len(head) - 1 + i, token].item() for i, token in enumerate(tail))


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server of the model, with a key."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    # A random model ends by itself too seldom for a client that waits ten seconds.
    limits = ["--set", "max_model_len=2048", "--set", "default_max_tokens=64"]
    command = [
        sys.executable, "-m", "rllib_llm.cli.main", "serve", str(model), "--local",
        "--port", str(port), "--name", NAME, *limits,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"RLLIB_SERVE_API_KEYS": KEY})
    try:
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").status == 200:
                    break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def install(name: str, folder: Path) -> tuple[list[str], str]:
    """The command that runs a client's checks, and its version; installs what is missing.

    Raises:
        RuntimeError: it cannot be installed; the message says why.
    """
    home = folder / re.sub(r"\W+", "-", name).strip("-")
    if name in NODE:
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "node_modules").is_dir():
            _must("npm", "install", "--silent", "--prefix", str(home), *NODE[name])
        script = home / "clients.mjs"  # beside its modules
        script.write_text(Path(__file__).with_suffix(".mjs").read_text())
        told = json.loads((home / "node_modules" / NODE[name][0] / "package.json").read_text())
        return ["node", str(script), name], told["version"]
    python = home / "bin" / "python"
    packages = PYTHON[name][0]
    if not python.is_file():
        _must(sys.executable, "-m", "venv", str(home))
        _must(str(python), "-m", "pip", "install", "--quiet", *packages)
    package = re.sub(r"\[.*", "", packages[0])
    version = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([str(python), "-c", version], capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr.strip().splitlines()[-1])
    return [str(python), str(Path(__file__).resolve()), "--checks", name], found.stdout.strip()


def _must(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]}") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError((error.stderr or "it failed").strip().splitlines()[-1][:200]) from None


def examine(name: str, folder: Path, environment: dict[str, str]) -> tuple[str, list[dict]]:
    """Version of a client and its checks; one that could not be run is one failed check."""
    try:
        command, version = install(name, folder)
    except RuntimeError as error:
        return "not installed", [{"what": "install", "error": str(error)}]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    try:
        made = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True,
                              timeout=SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return version, [{"what": "all", "error": f"it took longer than {SECONDS:g} s"}]
    lines = [line[6:] for line in made.stdout.splitlines() if line.startswith("CHECK ")]
    found = [json.loads(line) for line in lines]
    if made.returncode or not found:
        told = (made.stderr.strip().splitlines() or ["it said nothing"])[-1]
        found.append({"what": "run", "error": told})
    return version, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=[], help="by default all")
    parser.add_argument("--folder", type=Path, help="of the clients' environments")
    parser.add_argument("--url", help="of a server that runs, with /v1")
    parser.add_argument("--checks", help="run the checks of this client here")
    given = parser.parse_args()
    if given.checks:
        run_checks(given.checks, os.environ["CLIENTS_URL"])
        return 0
    folder = given.folder.resolve()
    model = folder / "model"
    logprob = make_model(model)
    rows, num_failed = [], 0
    with contextlib.nullcontext(given.url) if given.url else served(model) as url:
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        } | {"CLIENTS_URL": url, "CLIENTS_MODEL": str(model), "CLIENTS_LOGPROB": str(logprob),
             "CLIENTS_KEY": KEY, "CLIENTS_NAME": NAME, "NO_PROXY": "127.0.0.1",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}  # fmt: skip
        for name in given.clients or [*PYTHON, *NODE]:
            version, found = examine(name, folder, environment)
            failed = [one for one in found if one["error"]]
            for one in failed:
                print(f"{name}: {one['what']}: {one['error']}", file=sys.stderr, flush=True)
            num_failed += len(failed)
            passed = "; ".join(one["what"] for one in found if not one["error"])
            told = "; ".join(f"{one['what']}: {one['error'].splitlines()[0]}" for one in failed)
            rows.append(f"| {name} | {version} | {passed} | {told[:200] or 'nothing'} |")
            print(rows[-1], flush=True)
    print("\n| client | version | works | fails |\n|---|---|---|---|", *rows, sep="\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
