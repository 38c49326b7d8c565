"""An executor of tasks that is no cluster."""

from pathlib import Path


class InThisProcess:
    """Stands in for datatrove's executor: runs tasks here one after another, and none that is done again."""

    def __init__(self, pipeline, tasks: int, logging_dir: str, workers: int = 1, start_method: str = "fork"):
        (self.step,), self.tasks, self.folder = pipeline, tasks, Path(logging_dir)

    def run(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for rank in self.get_incomplete_ranks():
            try:
                self.step(None, rank, self.tasks)
            except ValueError as error:
                (self.folder / "logs" / f"task_{rank:05d}.log").write_text(str(error))
                raise
            (self.folder / str(rank)).touch()

    def get_incomplete_ranks(self, skip_completed: bool = True) -> list[int]:
        return [rank for rank in range(self.tasks) if not (self.folder / str(rank)).exists()]
