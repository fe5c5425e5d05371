"""Stands in for Docker's program: a container is a folder in $STAND_IN, and what is run in it is
run here, in its working directory. It notes its arguments in calls.jsonl. A file `pulling` holds
containers up."""

import json
import os
import shutil
import sys
import time

ROOT = os.environ["STAND_IN"]
WORKDIR = "/app"  # verifiers' default


def options(words):
    """The values of options by name, and the words after them."""
    found, flags = {}, ("-i", "-I", "-S", "--detach", "--rm", "--all", "--quiet", "--force")
    while words and words[0].startswith("-"):
        name, *words = words
        if name not in flags:
            found.setdefault(name, []).append(words.pop(0))
        else:
            found[name] = [""]
    return found, words


def run(words):
    given, rest = options(words)
    if "--detach" in given:
        (name,) = given["--name"]
        while os.path.exists(f"{ROOT}/pulling"):
            time.sleep(0.02)
        os.makedirs(f"{ROOT}/{name}")
        for label in given["--label"]:
            os.makedirs(f"{ROOT}/{name}/labels/{label}")
        note("made", name)
        print(name)
    elif given.get("--entrypoint") == ["python3"]:  # gives verifiers' proxy a socket
        folder = given["--volume"][0].partition(":")[0]
        words = [word.replace("/run/vf", folder) for word in rest[1:]]
        os.execv(sys.executable, [sys.executable, *words])


def execute(words):
    given, (name, *command) = options(words)
    if not os.path.isdir(f"{ROOT}/{name}"):
        sys.exit(f"Error response from daemon: No such container: {name}")
    place = f"{ROOT}/{name}{WORKDIR}"
    command = [place if word == WORKDIR else word for word in command]
    os.environ.update(pair.split("=", 1) for pair in given.get("--env", ()))
    os.chdir(place if "--workdir" in given else ROOT)
    os.execvp(command[0], command)


def inspect(words):
    given, (name,) = options(words)
    exists = os.path.isdir(f"{ROOT}/{name}")
    config = {"Env": ["LANG=C"], "User": str(os.getuid())}
    print(json.dumps(exists if "State" in given["--format"][0] else config))


def note(*words):
    with open(f"{ROOT}/calls.jsonl", "a") as file:
        file.write(json.dumps(words) + "\n")


def main(what, *words):
    note(what, *words)
    if what == "run":
        run(words)
    elif what == "exec":
        execute(words)
    elif what == "inspect":
        inspect(words)
    elif what == "port":
        print("127.0.0.1:40000")
    elif what == "ps":
        label = options(words)[0]["--filter"][0].removeprefix("label=")
        for name in os.listdir(ROOT):
            if os.path.isdir(f"{ROOT}/{name}/labels/{label}"):
                print(name)
    elif what == "rm":
        for name in options(words)[1]:
            shutil.rmtree(f"{ROOT}/{name}", ignore_errors=True)


main(*sys.argv[1:])
