"""Two engines that hand prompts over: the first computes them, the second reads its memory."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
from nixl_engines import _ended, _free_ports, _params
from planting import Rig, texts

#: Seconds until the first engine has started, and until it has answered.
_PATIENCE: Final = 240.0


@attrs.frozen
class Pair:
    """The second engine's half.

    Attributes:
        pipe: to the first engine, which gets prompts, and answers with what the second needs.
        pause: seconds that the second one waits before it reads, while the first goes on.
    """

    pipe: Any
    pause: float

    def asks(self, llm: Any) -> Callable[[list[list[int]]], list[list[int]]]:
        """Return a function that hands prompts over, and generates for them in the second."""
        number = 0

        def ask(prompts: list[list[int]]) -> list[list[int]]:
            nonlocal number
            number += 1
            llm.reset_prefix_cache()
            handed = self._handed(prompts)
            time.sleep(self.pause)
            asked = [
                (f"then-{number}-{index}", prompt + tokens, _params(4, given))
                for index, (prompt, (tokens, given)) in enumerate(zip(prompts, handed, strict=True))
            ]
            done = _ended(llm, asked)
            return [list(done[name].outputs[0].token_ids) for name, *_ in asked]

        return ask

    def _handed(self, prompts: list[list[int]]) -> list[tuple[list[int], dict[str, Any]]]:
        self.pipe.send(prompts)
        if not self.pipe.poll(_PATIENCE):
            raise RuntimeError("the first engine does not answer")
        found: list[tuple[list[int], dict[str, Any]]] = self.pipe.recv()
        return found


@contextmanager
def another(job: dict[str, Any], folder: Path, build: Callable[..., Any]) -> Iterator[Pair]:
    """Start the first engine; the process must not have touched the GPU yet."""
    ports, place = _free_ports(2), os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    here, there = multiprocessing.Pipe()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[0])
    first = multiprocessing.get_context("fork").Process(
        target=_be_first, args=(job, folder, build, there, here, place[0]), daemon=True
    )
    first.start()
    there.close()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[1])
    os.environ["CUDA_VISIBLE_DEVICES"] = place[-1]
    try:
        if not here.poll(_PATIENCE):
            raise RuntimeError(f"the first engine does not start; it ended with {first.exitcode}")
        here.recv()
        yield Pair(here, float(job.get("pause", 0.0)))
    finally:
        first.kill()


def _be_first(
    job: dict[str, Any], folder: Path, build: Callable[..., Any], pipe: Any, other: Any, gpu: str
) -> None:
    """Compute prompts that are asked for; other requests run meanwhile and take freed blocks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        other.close()
        llm = build(job, folder)
        rig, number = Rig(llm), 0
        llm.collective_rpc("audit_switch", args=(True,))
        pipe.send("ready")
        while True:
            if not pipe.poll(0.05):
                rig.run([*texts(800 + number % 8, 2, 40)], 8)
                number += 1
                continue
            asked = [
                (f"first-{number}-{index}", prompt, _params(1, {"do_remote_decode": True}))
                for index, prompt in enumerate(pipe.recv())
            ]
            number += 1
            llm.reset_prefix_cache()
            done = _ended(llm, asked)
            rig.watch.transfers._shared._thread.wait(60)
            pipe.send(
                [
                    (list(done[name].outputs[0].token_ids), done[name].kv_transfer_params)
                    for name, *_ in asked
                ]
            )
    except (EOFError, BrokenPipeError):  # the second engine has ended
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
