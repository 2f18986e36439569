"""Write a task of EleutherAI's lm-evaluation-harness as JSON lines, for `validation.tasks` and `evaluate --task`.

    python examples/harness_task.py NAME_OR_YAML OUT.jsonl        # needs lm_eval, and the data of the task

Each line has a context, its choices and the number of the right one, or the only answer, without examples before the
question. Tasks that generate text cannot be written so; `titanlite evaluate --lm-eval NAME` runs them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]


def lines(name: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of a task."""
    path = Path(name)
    manager = TaskManager(include_path=str(path.parent) if path.is_file() else None)
    [task] = get_task_dict([path.stem if path.is_file() else name], manager).values()
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
        sys.exit(
            f"{name} has the output type {task.OUTPUT_TYPE}: only multiple_choice and loglikelihood can be written"
        )
    for document in task.test_docs() if task.has_test_docs() else task.validation_docs():
        context = task.config.description + task.doc_to_text(document)
        target = task.doc_to_target(document)
        if task.OUTPUT_TYPE == "loglikelihood":
            yield {"context": context, "answer": target}
            continue
        choices = task.doc_to_choice(document)
        answer = choices.index(target) if isinstance(target, str) else target
        yield {"context": context, "choices": choices, "answer": answer, "delimiter": task.config.target_delimiter}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[2], "x", encoding="utf-8") as file:
        for line in lines(sys.argv[1]):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
