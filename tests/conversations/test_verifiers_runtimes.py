"""Tasks of verifiers that need a container: in Docker, for which a program stands in, and in a
runtime of one's own."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllib_llm.envs.adapters.verifiers_runtimes import bash_in
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.conversations.scripted import roll, settings

STAND_IN = Path(__file__).with_name("stand_in_docker.py")
HERE = "tests.conversations.vf_boxes"
OWN = f"{HERE}:Folder"


def bash(command):
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


class Local:
    """A runtime that runs commands here."""

    async def run(self, argv, env):
        return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_bash_says_what_a_command_prints_and_no_more_than_a_mebibyte(tmp_path):
    tool = bash_in(Local())
    assert asyncio.run(tool("echo \"it's\" out; echo err >&2; exit 3")) == "it's out\nerr\n"
    much = f"head -c 3000000 /dev/zero | tr '\\0' y && echo as well > {tmp_path}/finished"
    assert asyncio.run(tool(much)) == "y" * 2**20
    assert (tmp_path / "finished").exists()  # it is not killed where it is not read
    assert asyncio.run(tool("cat")) == ""  # nothing to read


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """The folder in which the stand-in keeps its containers."""
    program, containers = tmp_path / "bin" / "docker", tmp_path / "containers"
    program.parent.mkdir()
    containers.mkdir()
    program.write_text(f"#!{sys.executable} -IS\n{STAND_IN.read_text()}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(containers))
    return containers


def live_in(docker):
    return [entry for entry in docker.iterdir() if entry.is_dir()]


def calls_of(docker):
    return [json.loads(line) for line in (docker / "calls.jsonl").read_text().splitlines()]


def verbs_of(docker):
    return [call[0] for call in calls_of(docker)] if (docker / "calls.jsonl").exists() else []


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    assert holds()


@pytest.fixture
def make():
    pytest.importorskip("verifiers", reason="verifiers pins openai below 3: see the guide")
    from rllib_llm.envs.adapters.verifiers import VerifiersEnv

    made = []

    def build(runtime, data=None, **changes):
        given = {k: v for k, v in settings().items() if k != "prompts"}
        given |= {"taskset": f"{HERE}:Mends", "taskset_config": {"data": data or {}}}
        made.append(VerifiersEnv({**given, "runtime": runtime, "tool_timeout_s": 60, **changes}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def test_a_task_is_set_up_worked_at_and_scored_in_its_container(make, docker):
    env = make("docker")
    look, mend = "cat state.txt; echo , $WHO", "; echo done > state.txt"
    attempts, judged, policy = roll(
        env, lambda row: bash(look + mend * row), "Done.", num_prompts=1
    )  # fmt: skip
    assert '"bash"' in policy.asked() and "its combined stdout and stderr" in policy.asked()
    messages = [message for each in attempts for message in each.conversation.messages]
    said = [message["content"] for message in messages if message["role"] == "tool"]
    assert said == ["broken, the task\n"] * 2
    assert judged.columns[columns.SCORES].tolist() == [0.0, 1.0]
    assert judged.metrics["changed"].tolist() == [0.0, 1.0]
    assert live_in(docker) == []
    calls = calls_of(docker)
    started = [call for call in calls if call[:1] == ["run"] and "--detach" in call]
    assert [call[-2:] for call in started] == [["mend:1", "infinity"]] * 2
    assert [sum("WHO=the task" in word for word in call) for call in started] == [1, 1]
    places = [next(i for i, call in enumerate(calls) if word in call) for word in
              ("mkdir -p . && cat > state.txt", "cut", look)]  # fmt: skip
    assert places == sorted(places)  # no network from the end of setup on


def test_networks_and_users_of_a_container(make, docker):
    """verifiers refuses an agent's user that the image does not have."""
    data = {"agent_user": getpass.getuser(), "workdir": "/app", "resources": {"memory": 2}}
    env = make({"type": "docker", "allow": ["*"]}, data)
    roll(env, bash("true"), "Done.", num_prompts=1, num_completions=1)
    calls = calls_of(docker)
    assert not any("NET_ADMIN" in call for call in calls)
    (started,) = (call for call in calls if call[0] == "run" and "--detach" in call)
    assert started[started.index("--memory") + 1] == "2.0g"
    ran = [call for call in calls if "bash" in call]
    assert [call[call.index("--user") + 1] for call in ran] == [getpass.getuser()] * 2


@pytest.mark.slow
@pytest.mark.parametrize("pulls", [False, True])
def test_a_killed_sampler_leaves_no_container(docker, pulls):
    pytest.importorskip("verifiers", reason="verifiers pins openai below 3: see the guide")
    program = """
import asyncio, os, sys
from rllib_llm.envs.adapters.verifiers_runtimes import Runtimes
from tests.conversations.vf_boxes import Mend, MendData

async def start():
    await runtimes.make(Mend(MendData(prompt="x", image="mend:1")), "one").start()
    await asyncio.sleep(600)

runtimes = Runtimes("docker")
asyncio.run(start())
"""
    if pulls:
        (docker / "pulling").touch()
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: "run" in verbs_of(docker) if pulls else live_in(docker))
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: "ps" in verbs_of(docker))
    (docker / "pulling").unlink(missing_ok=True)  # when the reaper has looked once
    wait_until(lambda: "made" in verbs_of(docker) and not live_in(docker))


def test_a_runtime_of_one_s_own(make):
    env = make(OWN)
    _, judged, _ = roll(env, bash("echo done > state.txt"), "Done.", num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [1.0, 1.0]
    from tests.conversations.vf_boxes import Folder

    assert not Folder.live
    assert not make({"class": OWN, "bash": False}).toolbox.tools


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("setup", "OSError: setup failed"),
        ("finalize", "OSError: finalize failed"),
        ("mended", "mended failed"),
        ("late setup", "longer than max_seconds=1"),
        ("late mended", "longer than max_seconds=1"),
    ],
)
def test_a_container_ends_with_its_conversation_however_that_ends(make, broken, reason):
    from rllib_llm.envs.judges.rewards import UnjudgedError

    env = make(OWN, {"broken": broken}, max_seconds=1.0 if "late" in broken else 600.0)
    with pytest.raises(UnjudgedError, match=reason):
        roll(env, "Done.", num_prompts=1, num_completions=1)
    from tests.conversations.vf_boxes import Folder

    assert not Folder.live


def test_work_in_a_container_that_has_ended_is_not_scored(make):
    from rllib_llm.envs.judges.rewards import UnjudgedError

    for said in ("Done.", bash("echo done > state.txt")):
        with pytest.raises(UnjudgedError, match="the task's runtime has ended"):
            roll(make(f"{HERE}:Dying"), said, num_prompts=1)


def test_a_box_that_the_policy_breaks_is_scored_while_its_container_runs(make, docker):
    """Without its working directory no command runs in a container, `true` neither."""
    from rllib_llm.envs.judges.rewards import UnjudgedError

    env = make("docker", {"broken": "box"})
    _, judged, _ = roll(env, bash('rm -r "$PWD"'), "Done.", num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [0.0, 0.0]
    assert judged.columns[columns.VALID].tolist() == [True, True]
    with pytest.raises(UnjudgedError, match="the task's runtime has ended"):
        roll(env, bash('rm -r "$(dirname "$PWD")"'), "Done.", num_prompts=1)


def test_an_image_without_bash_is_refused_where_the_policy_has_the_tool(make):
    from rllib_llm.envs.judges.rewards import UnjudgedError

    with pytest.raises(UnjudgedError, match=r"runtime\.bash=True"):
        roll(make(f"{HERE}:Bare"), "Done.", num_prompts=1)
    _, judged, _ = roll(make({"class": f"{HERE}:Bare", "bash": False}), "Done.", num_prompts=1)
    assert judged.columns[columns.SCORES].tolist() == [0.0, 0.0]


def test_a_machine_s_network_is_given_where_it_is_asked_for(make):
    env = make({"type": "apptainer", "class": OWN, "network_access": True})
    roll(env, "Done.", num_prompts=1)


def test_a_task_with_a_second_container_is_refused(make):
    with pytest.raises(Problems) as caught:
        make(OWN, taskset=f"{HERE}:Stagings", taskset_config={})
    assert [problem.name for problem in caught.value.found] == ["task Staging number 0"]


@pytest.mark.parametrize(
    ("runtime", "data", "name"),
    [
        (None, {}, "task Mend number 0"),
        ({"type": "subprocess"}, {"image": None}, "runtime.type"),
        (OWN, {"skills": ["rows/skills"]}, "task Mend number 0"),
        (OWN, {"network_allow": ["a.b"], "network_block": ["c.d"]}, "task Mend number 0"),
        (OWN, {"artifacts": [{"source": "/out"}]}, "task Mend number 0"),
        ("docker", {"network_allow": ["pypi.org"]}, "runtime.allow"),
        ({"type": "docker", "allow": ["a.b"]}, {"network_allow": ["c.d"]}, "runtime.allow"),
        ("apptainer", {}, "runtime.network_access"),
        ({"type": "dokcer"}, {}, "runtime"),
        ({"type": "docker", "imag": "x"}, {}, "runtime"),
        ({"type": "docker", "bash": "no"}, {}, "runtime.bash"),
        (f"{HERE}:NoRuntime", {}, "runtime"),
        (f"{HERE}:Nothing", {}, "runtime.class"),
    ],
)  # fmt: skip
def test_what_no_task_can_run_in_is_refused(make, docker, runtime, data, name):
    with pytest.raises(Problems) as caught:
        make(runtime, data)
    assert [problem.name for problem in caught.value.found] == [name]


def test_docker_has_to_be_there(make, monkeypatch, tmp_path):
    make(OWN)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Problems, match="docker is not on PATH"):
        make("docker")
