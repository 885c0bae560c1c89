"""The rounds of a case: all variants built, checked, timed in turn, checked again."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping

from gpu_matrix.clocks import Call, Clock
from gpu_matrix.figures import DENSE, condense, noise_floor
from gpu_matrix.judge import Judge
from gpu_matrix.lab import Builders, Lab, Limits, Variant, require_device
from gpu_matrix.rows import Row, first_line, short

MODES = ("launch", "device")


def measure(builders: Builders, judge: Judge, lab: Lab, limits: Limits) -> Row:
    """All variants of a case: build, check, time on both clocks, check again."""
    rows: dict[str, Row] = {name: {"variant": name} for name in builders}
    variants = admit(builders, judge, lab, rows)
    result: Row = {"variants": list(rows.values()), "floor": {}}
    if DENSE not in variants:
        return result | {"error": "no dense baseline"}
    calls = {name: variant.run for name, variant in variants.items()}
    for mode in MODES:
        calls = {name: call for name, call in calls.items() if "error" not in rows[name]}
        if mode == "device":
            calls, result["device_calls"] = capture_all(calls, lab)
        samples = sample(mode, calls, lab, limits, rows)
        for name, figures in condense(samples, lab.clock.tick_ms).items():
            rows[name][mode] = figures
        floor = noise_floor(samples, lab.clock.tick_ms)
        result["floor"][mode] = None if floor is None else short(floor)
    check_again(calls, variants, judge, rows)
    return result


def admit(builders: Builders, judge: Judge, lab: Lab, rows: dict[str, Row]) -> dict[str, Variant]:
    """The variants that run and whose output is right; what is wrong with the others in `rows`."""
    admitted: dict[str, Variant] = {}
    for name, build in builders.items():
        row = rows[name]
        if name in lab.banned:
            row["error"] = "not tried: it took the CUDA context with it twice"
            continue
        lab.send(("try", name))
        try:
            variant = build()
            output = variant.output(variant.run())
            row["max_error"] = short(judge.error(output))
            wrong = judge.wrong(output, rows[DENSE].get("max_error"))
        except Exception as failure:  # noqa: BLE001  a variant that fails is a row
            row["error"] = first_line(failure)
            require_device(lab)
            continue
        if variant.note:
            row["note"] = variant.note
        if wrong:
            row["verdict"] = "wrong"
        else:
            admitted[name] = variant
    return admitted


def capture_all(calls: dict[str, Call], lab: Lab) -> tuple[dict[str, Call], str]:
    """Graphs of all calls, or the calls as they are: like is compared with like."""
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        if name not in lab.uncapturable:
            lab.send(("try", name))
            try:
                replays[name] = lab.clock.capture(call)
            except Exception as error:  # noqa: BLE001  any: the calls themselves remain
                # the end of a broken capture fails too: the first error is the reason
                lab.uncapturable[name] = first_line(error.__context__ or error)
                lab.send(("uncapturable", name, lab.uncapturable[name]))
                require_device(lab)
        if name in lab.uncapturable:
            return calls, f"direct, {name} cannot be captured: {lab.uncapturable[name]}"
    return replays, "graph"


def sample(
    mode: str, calls: Mapping[str, Call], lab: Lab, limits: Limits, rows: dict[str, Row]
) -> dict[str, list[float]]:
    """Milliseconds of each call by round; a call that fails on the way is dropped, with its row."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng, started, ahead_ms = random.Random(lab.seed), time.monotonic(), 0.1
    for done in range(-1, limits.rounds):  # the first is no sample: it warms up
        if done >= limits.least and time.monotonic() - started > limits.seconds:
            break
        for name in rng.sample(list(samples), len(samples)):
            try:
                if done < 0:
                    spent_ms = enqueue_ms(calls[name], lab.clock)
                    ahead_ms = max(ahead_ms, min(100.0, 0.05 + 1.5 * spent_ms))
                elif mode == "launch":
                    samples[name].append(lab.clock.launch_ms(calls[name]))
                else:
                    samples[name].append(lab.clock.device_ms(calls[name], ahead_ms))
            except Exception as error:  # noqa: BLE001  a variant that fails is a row
                rows[name]["error"] = f"{mode}, round {done}: {first_line(error)}"
                del samples[name]
                require_device(lab)
    return samples


def enqueue_ms(call: Call, clock: Clock) -> float:
    """CPU time of a call, the device idle before: of the second, after one to warm up."""
    for _ in range(2):
        clock.settle()
        start = time.perf_counter()
        call()
        spent = 1e3 * (time.perf_counter() - start)
    clock.settle()
    return spent


def check_again(
    calls: Mapping[str, Call], variants: Mapping[str, Variant], judge: Judge, rows: dict[str, Row]
) -> None:
    """What was timed last must still be right: races show late, and in graphs."""
    for name, row in rows.items():
        if name not in calls or "error" in row:
            continue
        output = variants[name].output(calls[name]())
        if judge.wrong(output, rows[DENSE]["max_error"]):
            row |= {"verdict": "wrong", "max_error_after": short(judge.error(output))}
            for mode in MODES:
                row.get(mode, {}).pop("verdict", None)
