"""The base Algorithm of all stages: learners, results, checkpoints, messages to the driver.

A trial that takes too long to be set up is killed. Tune counts a trial as running once it is set
up, and waits for that for ever; `RestartHungTrials` can kill only what is running. So a process of
its own watches over the set-up: it answers also while the trial's process is stopped, or hangs in a
library that holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import LocalFileSystem
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import ALL_MODULES, LEARNER_RESULTS
from ray.tune import PlacementGroupFactory, Trainable

from rllib_llm.algorithms.language_model_config import (
    AUTO,
    DECIDED,
    LanguageModelConfig,
    frozen_with,
    with_decided_precision,
)
from rllib_llm.algorithms.places import processes, wait_for_places
from rllib_llm.algorithms.results import HEADLINE, with_headline
from rllib_llm.checkpoints.algorithm import WholeCheckpoints, in_its_folder
from rllib_llm.checkpoints.folder import make_readable
from rllib_llm.learners.metrics import MEANS, MESSAGES, NUM_PARAMETERS, REPORT
from rllib_llm.overseer.phases import SAVING, STARTING, Oversight, Phases
from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.messages import (
    MESSAGES_FILE,
    Listener,
    MessageLog,
    TrialMessage,
    raise_plainly,
)
from rllib_llm.shared.storage import fetch_file

logger = logging.getLogger(__name__)

# Ends quietly on a signal, or when its parent is dead: it is another's child then. A pipe
# would not tell: any process that is forked meanwhile holds its other end as well.
_WATCHER = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
end = time.monotonic() + seconds
while os.getppid() == pid:
    if time.monotonic() >= end:
        print(f"process {pid} is killed: the trial was not set up in {seconds:.0f} s "
              "(setup_timeout_s)", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
        break
    time.sleep(min(1.0, max(0.0, end - time.monotonic())))
"""


@contextmanager
def killed_after(seconds: float | None) -> Iterator[None]:
    """Kills this process unless the block ends within `seconds`; None: no limit."""
    if seconds is None:
        yield
        return
    command = [sys.executable, "-S", "-c", _WATCHER, str(os.getpid()), str(seconds)]
    watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


TRIAL_ID = re.compile(r"[0-9a-f]{5,8}_\d{5}")  # Tune's, in the name of a trial's folder


class LanguageModelAlgorithm(WholeCheckpoints):
    """An Algorithm whose checkpoints contain the model as a Hugging Face folder, and whose results
    have the field's usual metric names at top level."""

    _progress_metrics = (*HEADLINE,)  # what Tune shows of a trial's last result
    config: LanguageModelConfig
    config_class: type[LanguageModelConfig] | None = None

    @classmethod
    def get_default_config(cls) -> Any:
        if cls.config_class is None:
            rule = "be a subclass of LanguageModelConfig"
            raise Problems(f"{cls.__name__}.config_class", rule, "the algorithm's settings are its")
        return cls.config_class(algo_class=cls)

    @classmethod
    def default_resource_request(cls, config: Any) -> PlacementGroupFactory:
        """As RLlib's, with a bundle for every process of ours; `num_cpus_for_main_process` decides
        alone where the learner is in the main process and its CPUs are not set: RLlib would take a
        whole one for it at least."""
        request = super().default_resource_request(config)
        settings = cls.get_default_config().update_from_dict(config)
        main, cpus = dict(request.bundles[0]), settings.num_cpus_for_main_process
        # 0 would leave a trial without any resource, which Tune cannot place.
        if not settings.num_learners and settings.num_cpus_per_learner == AUTO and cpus:
            main["CPU"] = cpus
        bundles = [main, *processes(settings)]
        return PlacementGroupFactory(bundles, strategy=request.strategy)

    def __init__(self, config: Any = None, env: Any = None, **kwargs: Any):
        settings = self.get_default_config() if config is None else config
        seconds = None
        self._given = settings, env
        self._listener: Listener | None = None
        self._message_log: MessageLog | None = None
        self.phase = Phases(STARTING, self._show)
        self.oversight = Oversight(self.phase, self.scale_samplers)
        # An actor can be restarted by others; a script or a notebook cannot.
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            self._listener = Listener("trial")
            default = self.get_default_config().setup_timeout_s
            seconds = settings.get("setup_timeout_s", default)
            # Relative paths in settings mean the folder in which Ray's processes start, the
            # script's, in samplers too; Tune would move this one elsewhere.
            os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
        try:
            with killed_after(seconds), self._listening():
                super().__init__(config=config, env=env, **kwargs)
        except ValueError as error:
            raise_plainly(error)
        self.phase.outside(STARTING, "starting an iteration")

    def __repr__(self) -> str:
        return type(self).__name__  # in Ray's messages

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Records warnings and log lines of this process while a block runs, inside a trial only: a
        script or notebook shows them anyway."""
        if self._listener is None:
            yield
            return
        try:
            with self._listener:
                yield
        finally:
            self.tell(self._listener.take())

    def tell(self, messages: list[TrialMessage]) -> None:
        """Writes messages to the trial's folder, from where the command shows warnings."""
        if messages and self._message_log is not None:
            self._message_log.write(messages, self.iteration + 1)

    def _show(self, activity: str) -> None:
        """Publishes the trial's current activity in its folder; "": none."""
        if self._listener is not None and self._message_log is not None:
            self._message_log.doing(activity)

    def setup(self, config) -> None:
        self.known_metrics: dict[str, Any] = {}  # of the latest iteration, nested by group
        self._learner_means: dict[str, float] = {}  # by name, of the iteration or call under way
        self._num_parameters: dict[str, dict[str, int]] = {}  # of each module
        self._config_in_results: dict[str, Any] | None = None
        self.eval_metrics: dict[str, float] | None = None  # the latest held-out results
        self.eval_env_runner_group = None
        self._fetch_logs()
        self._message_log = MessageLog(self.trial_folder)
        if self._listener is not None:
            self._listener.take()  # what settings warn of was said where they were given
        counts = {"samplers": self.config.num_env_runners, "learners": self.config.num_learners}
        started = " and ".join(f"{n} {name}" for name, n in counts.items() if n)
        self.phase.outside(STARTING, f"loading models{started and f', starting {started}'}")
        self.config = in_its_folder(self.config)
        self.config = with_decided_precision(self.config)
        self._join_overseer()
        wait_for_places(self.config)
        self.read_data()
        super().setup(config)
        if not self.learner_group.is_local:
            answers = self.learner_group.foreach_learner(lambda learner: learner.take_messages())
            for messages in (answer.get() for answer in answers if answer.ok):
                self.tell(messages)

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> Any:
        """As RLlib's; without samplers the first learner's module, a copy of it where that is a
        process of its own."""
        if self.env_runner_group is not None:
            return super().get_module(module_id)
        results = self.learner_group.foreach_learner(
            lambda learner: learner.module[module_id].unwrapped(), remote_actor_ids=[0]
        )
        return next(iter(results)).get()

    def _fetch_logs(self) -> None:
        """Downloads the logs of an earlier process of this trial from a URL, so that uploads extend
        them instead of replacing them."""
        storage = getattr(self, "_storage", None)
        if storage is None or isinstance(storage.storage_filesystem, LocalFileSystem):
            return
        for name in (MESSAGES_FILE, SAMPLES_FILE):
            source = f"{storage.trial_fs_path}/{name}"
            fetch_file(storage.storage_filesystem, source, self.trial_folder / name)

    def _join_overseer(self) -> None:
        """Reports to the overseer of this Tune run, if it is one, and has samplers do so."""
        overseen = self._storage is not None and self.config.overseer
        folder = self.trial_folder.parent
        # RLlib keeps Tune's id of the trial from us; its folder is called by it.
        found = TRIAL_ID.search(self.trial_folder.name)
        trial = found[0] if found else self.trial_folder.name
        place = (str(folder), trial) if overseen else None
        if place != getattr(self.config, "_overseer", None):  # that of a checkpoint is of its run
            self.config = frozen_with(self.config, _overseer=place)
        if not overseen:
            return
        from rllib_llm.overseer.link import Link  # few runs are overseen

        facts = {"kind": "trial", "trial": trial, "stage": folder.name,
                 "algorithm": type(self).__name__}  # fmt: skip
        self.oversight.link = Link(
            folder, f"trial {trial}", lambda: {**facts, **self.oversight.report()},
            restarts_hung=True,
        )  # fmt: skip

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As RLlib's, which makes a dict of the config for every result: once suffices."""
        metrics = Trainable.get_auto_filled_metrics(self, *args, **kwargs)
        if isinstance(metrics.get("config"), AlgorithmConfig):
            if self._config_in_results is None:
                self._config_in_results = self.config.to_dict()
            metrics["config"] = dict(self._config_in_results)
        return metrics

    def scale_samplers(self, num_samplers: int) -> str:
        """Sets the number of samplers from the next request on; returns a description of the
        change.

        Raises:
            Problems: that cannot be; stages without samplers refuse all numbers.
        """
        raise Problems("samplers", "be left as they are",
                       f"{type(self).__name__} has no samplers", value=num_samplers)  # fmt: skip

    def read_data(self) -> None:
        """Reads the data. Called before learners are built, so that faults in data show first."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Restarts with `new_config` in the same process (Tune's `reuse_actors`, which saves the
        start of a process and its imports)."""
        self._begin_again(new_config)
        return True

    def _begin_again(self, config: Any, env: Any = None) -> None:
        of_tune = ("_trial_info", "_stdout", "_stderr")
        kept = {name: value for name, value in vars(self).items() if name.startswith(of_tune)}
        self.cleanup()
        type(self).__init__(self, config=config, env=env, storage=self._storage)
        self.__dict__.update(kept)

    def about(self) -> dict[str, Any]:
        """Adds what "auto" was decided to be."""
        return super().about() | {name: getattr(self.config, name) for name in DECIDED}

    def go_on_from(self, about: dict[str, Any]) -> None:
        """Computes as the checkpoint's run did where it was left to the hardware, which may be
        another here."""
        config, env = self._given
        defaults = self.get_default_config()
        kept = {
            name: about[name]
            for name in DECIDED
            if config.get(name, getattr(defaults, name)) == AUTO
            and about.get(name, getattr(self.config, name)) != getattr(self.config, name)
        }
        if not kept:
            return
        for name, value in kept.items():
            logger.warning("%s='auto' is %r, as in this run's checkpoint", name, value)
        if isinstance(config, Mapping):
            config = {**config, **kept}
        else:
            config = config.copy(copy_frozen=False)
            for name, value in kept.items():
                setattr(config, name, value)
        self._begin_again(config, env)

    @property
    def trial_folder(self) -> Path:
        """Where this run's files go: the trial's own folder where Tune keeps it on this disk,
        else the log folder, which Tune uploads with `SyncConfig(sync_artifacts=True)`."""
        storage = getattr(self, "_storage", None)
        if storage is not None and isinstance(storage.storage_filesystem, LocalFileSystem):
            return Path(storage.trial_fs_path)
        return Path(self.logdir)

    def learner_metrics(self) -> dict[str, dict[str, float]]:
        """The learners' latest means, `group/name` nested by group; the rest under ''."""
        groups: dict[str, dict[str, float]] = {}
        for name, value in self._learner_means.items():
            group, _, leaf = name.rpartition("/")
            groups.setdefault(group, {})[leaf] = value
        return groups

    def note(self, groups: dict[str, Any], episode: int, rows_per_second: float) -> None:
        """Keeps an iteration's metrics by group for its result."""
        of_samplers = {**groups.get("throughput", {}), **groups.get("weights", {})}
        if not self.config.num_env_runners:
            of_samplers.pop("starved_seconds", None)  # it is this thread, which is measured anyway
        self.oversight.waited(of_samplers)
        lr = groups.pop("", {}).get("lr", 0.0)
        self.known_metrics = {**groups, "lr": lr, "episode": episode, "eps": rows_per_second}

    def update_learners(
        self, columns: dict[str, Any], num_rows: int, version: int | None = None
    ) -> dict[str, Any]:
        """Updates all learners with a batch, which they share row by row. Returns the learners'
        report; `version`: see `LanguageModelLearner.update`."""
        self.has_begun_to_learn = True
        self._learner_means = {}  # RLlib may ask for several steps for one result: the last counts
        batch = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, env_steps=num_rows)
        if self.learner_group.is_local:
            results = self.learner_group.update(batch=batch, version=version)
        else:
            refs = [ray.put(batch)] * self.config.num_learners
            results = self.learner_group.update(batch_refs=refs, version=version)
        return self._take(results)

    def foreach_learner(self, call: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Calls a method on every learner whose results are those of an update; returns the
        learners' messages."""
        self.has_begun_to_learn = True
        results = [answer.get() for answer in self.learner_group.foreach_learner(call)]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._take(results)

    def pop_learner_metrics(self) -> dict[str, dict[str, float]]:
        """`learner_metrics`, which are forgotten: in a custom loop no result does so."""
        groups = self.learner_metrics()
        self._learner_means = {}
        return groups

    def _take(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Removes the learners' messages from their results, so that RLlib's metrics remain. Shares
        of means are summed, warnings are logged."""
        report: dict[str, Any] = {}
        for result in results:
            report |= (mine := result.pop(REPORT))
            self.tell(mine[MESSAGES])
            for name, share in mine[MEANS].items():
                self._learner_means[name] = self._learner_means.get(name, 0.0) + share
            self._num_parameters = mine[NUM_PARAMETERS]
        if any(results):
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        return report

    def train(self) -> dict[str, Any]:
        """One iteration, as RLlib's. Commands of the overseer are carried out between iterations. A
        run that is stopped while paused returns its last result again, marked, without computing
        anything."""
        marks = self.oversight.before_iteration()
        if not marks:
            self._newest_result = super().train()
        return {**self._newest_result, **marks}

    def step(self) -> dict[str, Any]:
        """RLlib's result plus the known names, and the latest held-out results under `eval`."""
        try:
            with self._listening():
                results = super().step()
        except ValueError as error:
            raise_plainly(error)
        self._report_learners(results)
        for name, value in self.known_metrics.items():
            if isinstance(value, dict):
                results[name] = {**results.get(name, {}), **value}
            else:
                results[name] = value
        if self.eval_metrics is not None:
            results["eval"] = dict(self.eval_metrics)
        results["time_share"] = self.oversight.end_iteration(self.iteration + 1)
        return with_headline({**results, **self.oversight.after_iteration()})

    def _report_learners(self, results: dict[str, Any]) -> None:
        """Puts the learners' means where RLlib has those that go through its logger; they are
        forgotten."""
        means, self._learner_means = self._learner_means, {}
        if not means:
            return
        counted = list(self._num_parameters.values())
        total = {name: sum(each[name] for each in counted) for name in counted[0]}
        of_modules: dict[str, dict[str, Any]] = {**self._num_parameters, ALL_MODULES: total}
        of_modules[DEFAULT_MODULE_ID] = of_modules[DEFAULT_MODULE_ID] | means
        found = results.setdefault(LEARNER_RESULTS, {})
        for module, own in of_modules.items():
            found[module] = {**found.get(module, {}), **own}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """As RLlib's."""
        with self.phase(SAVING, "saving a checkpoint"):
            super().save_checkpoint(checkpoint_dir)

    def cleanup(self) -> None:
        self._show("")
        self.oversight.close()
        super().cleanup()

    def export_model(self, folder: str | Path) -> Path:
        """Writes the model as it is now to `folder`, as `from_pretrained` reads it."""
        return self._export(folder, "export_pretrained")

    def export_adapters(self, folder: str | Path) -> Path:
        """Writes the adapters that are trained, without the frozen trunk, as peft reads them."""
        return self._export(folder, "export_adapters")

    def _export(self, folder: str | Path, how: str) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder.resolve())
        for result in self.learner_group.foreach_learner(lambda each: each.export_model(path, how)):
            if not result.ok:
                raise result.get()
        make_readable(folder)
        return folder
