"""Where things lie in the folder of a run, by path or by URL.

    RUN           run.json: which file or command started it, and its stages in order
      STAGE       stage.json once it has ended, report.html, overseer.address
        TRIAL     result.json, params.json, samples.jsonl, messages.jsonl
          checkpoint_000007, best_checkpoint, rollouts, model
      replaced    stages and trials that began again without a checkpoint, as they were

Commands take any of these folders. A `Tuner` in Python writes stages without a run around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_llm.shared.storage import Place, read_json

RUN_RECORD, STAGE_RECORD = "run.json", "stage.json"
MODEL_CARD = "README.md"  # in the folder of a trained model
RESULTS, SETTINGS_FILE = "result.json", "params.json"  # Tune's
REPLACED = "replaced"
CHECKPOINTS = "checkpoint_*"
_MAX_NAMED = 8


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, of a stage or of a trial."""

    folder: Place

    def in_trials(self, entry: str) -> list[Place]:
        """Returns entries of this name or pattern in a trial, in the trials of a stage, or in those
        of a run."""
        return [path for above in ("", "*/", "*/*/") for path in self.folder.glob(above + entry)]

    def in_stages(self, entry: str) -> list[Place]:
        """Returns entries of this name in a stage, or in the stages of a run."""
        return [path for above in ("", "*/") for path in self.folder.glob(above + entry)]

    def checkpoints(self) -> list[Place]:
        """Tune's checkpoint folders of this one trial, the newest first, usable or not."""
        numbers = {
            path: int(number)
            for path in self.folder.glob(CHECKPOINTS)
            if (number := path.name.partition("_")[2]).isdigit() and path.is_dir()
        }
        return sorted(numbers, key=numbers.__getitem__, reverse=True)

    def saved_trials(self) -> list[Place]:
        """The trials with checkpoints; of a run's stages, those of the last that has some."""
        if self.checkpoints():
            return [self.folder]
        trials = sorted({path.parent for path in self.in_trials(CHECKPOINTS)}, key=str)
        begun = {trial.parent.name for trial in trials}
        stages = read_json(self.folder / RUN_RECORD).get("experiments", ())
        order = [stage["name"] for stage in stages if stage["name"] in begun]
        return [trial for trial in trials if trial.parent.name in order[-1:]] or trials

    def holding(self, entry: str) -> list[Place]:
        """The folders in this one that are runs or stages with such an entry, by their names."""
        if not self.folder.is_dir():
            return []
        inner = (path for path in self.folder.iterdir() if path.is_dir())
        return sorted((one for one in inner if RunFolder(one).in_trials(entry)), key=str)


def name_one(folders: Sequence[Place]) -> str:
    """Advice to name one of these folders; "" for none."""
    more = f" or {len(folders) - _MAX_NAMED} more" if len(folders) > _MAX_NAMED else ""
    names = ", ".join(map(str, folders[:_MAX_NAMED]))
    return f"Name one of {names}{more}" if folders else ""
