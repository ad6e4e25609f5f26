"""`antiphon prepare`: everything about a model that needs the network or takes long, done once, ahead.

`antiphon serve` runs it as a process of its own before the workers start, so that the supervisor stays small and only
one process downloads and converts. With everything in the cache it returns at once and needs no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from antiphon_telemetry.exit import ExitCode


def prepare(model: str, engine: str, cache_dir: str) -> int:
    """Prepare `model` for `engine`; the exit code. Progress and errors are lines on stderr."""
    if engine != "torch":
        return ExitCode.OK
    from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
    from antiphon_engine.torch_engine.errors import TorchEngineError

    from antiphon.fetch_errors import FetchError
    from antiphon.model_reference import fetched, parse_reference

    cache = Path(cache_dir) if cache_dir else default_cache_dir()
    try:
        reference = parse_reference(model)
        if reference is not None:
            path = fetched(reference, cache, _say)
            _say(f"the model is in {path}")
            return _checked(path)
    except FetchError as error:
        _say(str(error))
        return error.exit_code
    if model != "demo":
        return _checked(Path(model).expanduser())

    try:
        prepare_demo(cache, _say)
    except TorchEngineError as error:
        _say(str(error))
        return error.exit_code
    except (TimeoutError, OSError) as error:
        _say(f"the demo model cannot be prepared: {error}")
        return ExitCode.FAILURE
    return ExitCode.OK


def _checked(path: Path) -> int:
    """The exit code of a folder that is there, or of a GGUF file of a kind that is served."""
    from antiphon_engine.torch_engine.errors import TorchEngineError
    from antiphon_engine.torch_engine.gguf_model.configuration import read_config
    from antiphon_engine.torch_engine.gguf_model.file import is_gguf, read_gguf

    if path.is_dir():
        return ExitCode.OK
    if not is_gguf(path):
        _say(
            f"there is no model folder {str(path)!r}: name a folder in Hugging Face layout, a GGUF file, "
            "hf://org/name, or `demo`"
        )
        return ExitCode.BAD_INPUT
    try:
        read_config(read_gguf(path))
    except TorchEngineError as error:
        _say(str(error))
        return error.exit_code
    return ExitCode.OK


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
