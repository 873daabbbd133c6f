"""`strop doctor`: whether the machines that a run would use fit together; of a run, what its numbers say;
of the rollout engines, whether they work.

Exit codes: 0 nothing is wrong; 1 something is, each thing told in a sentence.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from strop.cli.settings import is_setting, load_settings, user_path
from strop.cli.unused_keys import ENGINES, Reads, refuse_unread
from strop.cli.versions import versions_in
from strop.rollout.registry import OWN_PROCESSES
from strop.utils.terminal import UsageError, plain, print_json, print_plain

if TYPE_CHECKING:
    from strop.cli.doctor.survey import MachineFacts
    from strop.controller.ray.cluster import Node
    from strop.observability.health import Diagnosis
    from strop.trainer.config import Config
    from strop.trainer.sections import ResourcesConfig

SUMMARY = "check the machines of a cluster before a run; or diagnose a run from its metrics"
EPILOG = """\
examples:
  strop doctor
  strop doctor resources.address=auto --path /shared/runs
  strop doctor --config config.yaml
  strop doctor runs/first
  strop doctor --engines

With a run folder it reads the metrics of that run and says what the health rules find in them, with the step in which
each one spoke first (docs/preflight.md lists the rules). The run may be finished, interrupted or still going on.

With --engines it makes a small model and tries the installed rollout engines on it: start, greedy decoding, log-probs
against the trainer's model, new weights, sleep, abort. Each is `ok` or `FAIL`, with what to do.

Without one it looks at the machines of a cluster, or, without resources.address, at this machine alone with a private
Ray cluster. Exit code 0: nothing is wrong; 1: something is, and each line says what to do.
"""

READS = Reads(
    keys=("resources", *ENGINES),
    but=(
        "resources.num_threads", "resources.call_timeout_s", "resources.start_timeout_s", "resources.offload_idle",
    ),
)  # fmt: skip
MAX_CLOCK_DIFFERENCE_S = 2.0
"""Above it, times in logs of different machines cannot be compared."""
MIN_SHARED_MEMORY_BYTES = 2**30
"""Less room in /dev/shm makes Ray's object store spill to the disk."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One thing that was checked."""

    check: str
    is_fine: bool
    text: str
    """The observation and, where it is not fine, the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, or the name of a preset")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="RUN|key=value",
        help="a run folder; or settings of the cluster",
    )
    parser.add_argument(
        "--path",
        metavar="DIR",
        type=user_path,
        help="a folder that every machine must see, such as that of the runs (default: the current one)",
    )
    parser.add_argument(
        "--engines", action="store_true", help="try what the installed rollout engines can do"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    folders = [word for word in args.overrides if not is_setting(word)]
    if args.engines:
        return _try_engines(args)
    if folders:
        _refuse_more(args, folders)
        return _diagnose(Path(folders[0]), wants_json=args.json)
    args.trust_code = False
    config = load_settings(args, needs=("resources", *(f"rollout.{name}" for name in OWN_PROCESSES)))
    refuse_unread(args, "doctor", READS)
    findings = [_rollout(config), *examine(config.resources, path=args.path or Path.cwd())]
    if args.json:
        print_json({"findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            print_plain(f"{'ok  ' if finding.is_fine else 'FAIL'} {finding.check}: {finding.text}")
    return 0 if all(finding.is_fine for finding in findings) else 1


def _try_engines(args: argparse.Namespace) -> int:
    """A live check of the rollout engines."""
    arguments = [*args.overrides, *(f"--{name}" for name in ("config", "path") if getattr(args, name))]
    if arguments:
        raise UsageError(
            f"--engines tries all that are installed, so {' '.join(arguments)} has no place beside it"
        )
    from strop.cli.doctor.engines import check_engines  # torch: seconds

    return check_engines(wants_json=args.json)


def _refuse_more(args: argparse.Namespace, folders: list[str]) -> None:
    extra = [word for word in args.overrides if word != folders[0]]
    extra += [f"--{name}" for name in ("config", "path") if getattr(args, name) is not None]
    if extra:
        raise UsageError(
            f"`strop doctor {folders[0]}` looks at that run, so {' '.join(extra)} has no place here"
        )


def _diagnose(folder: Path, *, wants_json: bool) -> int:
    """Print the diagnoses of the health rules for a run."""
    from strop.observability.health import RULES

    diagnoses, num_steps = diagnose(folder)
    if wants_json:
        print_json(
            {
                "run": str(folder),
                "steps": num_steps,
                "diagnoses": [{"step": step, **asdict(diagnosis)} for step, diagnosis in diagnoses],
            }
        )
    else:
        for step, diagnosis in diagnoses:
            print_plain(plain(f"step {step}  {diagnosis.name}: {diagnosis.message}", is_one_line=True))
        rest = (
            f"{len(diagnoses)} of {len(RULES)} rules spoke"
            if diagnoses
            else f"none of {len(RULES)} rules spoke"
        )
        print_plain(f"{num_steps} steps; {rest}")
    return 1 if diagnoses else 0


def diagnose(folder: Path) -> tuple[list[tuple[int, Diagnosis]], int]:
    """The rules that apply to a run with the step in which each one spoke first, and how many steps there are.

    Raises:
        RunError: there is no run.
        UsageError: it has no metrics.
    """
    from strop.observability.health import HealthMonitor
    from strop.observability.trackers.setup import METRICS_FILE, read_metrics
    from strop.run import RunFolder

    RunFolder.open(folder, read_only=True).close()
    file = folder / METRICS_FILE
    steps = read_metrics(file) if file.is_file() else []
    if not steps:
        raise UsageError(
            f"{folder} has no metrics in {METRICS_FILE} yet; a run writes them after its first step, unless 'jsonl' "
            f"was taken out of trainer.trackers"
        )
    monitor = HealthMonitor()
    diagnoses = [
        (int(numbers["step"]), diagnosis) for numbers in steps for diagnosis in monitor.observe(numbers)
    ]
    return diagnoses, int(steps[-1]["step"])


def _rollout(config: Config) -> CheckResult:
    """Check the rollout engine: its name, its devices, and that it is installed here."""
    text = config.placement().removeprefix("rollout: ")
    subprocess_config = config.rollout.own_processes
    if subprocess_config is None:
        return CheckResult(check="rollout", is_fine=True, text=text)
    try:
        python = subprocess_config.installed()
    except ValueError as error:
        return CheckResult(check="rollout", is_fine=False, text=f"{text}: {error}")
    versions = versions_in(python, config.rollout.engine) or "of versions that it does not say"
    return CheckResult(check="rollout", is_fine=True, text=f"{text}; {versions} in {python}")


def examine(resources: ResourcesConfig, *, path: Path) -> list[CheckResult]:
    """Everything that is checked, on every machine of the cluster.

    Args:
        resources: the cluster and what a run would ask of it.
        path: a folder that every machine should see.
    """
    from strop.cli.doctor.survey import survey
    from strop.controller.ray.cluster import Cluster

    cluster = Cluster(resources.address or None)
    started, begun = time.time(), time.monotonic()
    try:
        token = uuid4().hex
        with tempfile.NamedTemporaryFile("w", dir=path, prefix=".strop-doctor-", encoding="utf-8") as marker:
            marker.write(token)
            marker.flush()
            answers = survey(cluster, marker=Path(marker.name).resolve())
    finally:
        cluster.close()
    machines = [(node, facts) for node, facts in answers if not isinstance(facts, str)]
    silent = [f"{node.address}: {reason}" for node, reason in answers if isinstance(reason, str)]
    findings = [
        CheckResult(
            check="machines",
            is_fine=not silent,
            text=f"{len(machines)} of {len(answers)} answered"
            + (f"; {'; '.join(silent)}. Look at the logs of Ray there" if silent else ""),
        )
    ]
    if machines:
        facts = [facts for _, facts in machines]
        findings += [*_versions(facts), _devices(machines, resources), *_capacity(machines, resources)]
        findings += [
            _ports(facts),
            _paths(facts, token, path),
            _clocks(facts, started, time.monotonic() - begun),
            _shared_memory(facts),
        ]
    return findings


def _versions(machines: list[MachineFacts]) -> Iterator[CheckResult]:
    first = machines[0]
    for name in ("python", *first.versions):
        values = {m.address: m.python if name == "python" else m.versions[name] for m in machines}
        kinds = sorted(set(values.values()))
        if kinds == [""]:
            continue
        text = f"{name} {kinds[0]}" if len(kinds) == 1 else _by_value(values)
        advice = f"; install one version of {name} everywhere" if len(kinds) > 1 else ""
        yield CheckResult(check="version", is_fine=len(kinds) == 1, text=text + advice)


def _devices(machines: list[tuple[Node, MachineFacts]], resources: ResourcesConfig) -> CheckResult:
    values = {facts.address: f"{facts.num_devices} {facts.device}" for _, facts in machines}
    device = resources.device
    lacking = [facts.address for _, facts in machines if device not in ("auto", facts.device)]
    equal = len(set(values.values())) == 1
    text = f"{next(iter(values.values()))} each" if equal else _by_value(values)
    if lacking and device != "cpu":
        return CheckResult(
            check="devices",
            is_fine=False,
            text=f"{text}; no {device} on {', '.join(lacking)}: check its driver",
        )
    advice = "" if equal else "; ranks are spread evenly, so machines should be alike: leave the odd one out"
    return CheckResult(check="devices", is_fine=equal, text=text + advice)


def _capacity(machines: list[tuple[Node, MachineFacts]], resources: ResourcesConfig) -> Iterator[CheckResult]:
    if resources.runtime != "ray":
        return
    num_ranks = resources.ranks + sum(resources.apart.values())
    cores = sum(node.total.get("CPU", 0.0) for node, _ in machines)
    needed = num_ranks * resources.cpus_per_rank
    yield CheckResult(
        check="capacity",
        is_fine=len(machines) >= resources.nodes and cores >= needed,
        text=f"{num_ranks} ranks on {resources.nodes} nodes need {needed:g} CPU cores; there are {cores:g} on "
        f"{len(machines)} nodes"
        + ("" if cores >= needed else "; lower resources.ranks or resources.cpus_per_rank"),
    )


def _ports(machines: list[MachineFacts]) -> CheckResult:
    public = [(m.address, port) for m in machines for port in m.ports if port.is_public]
    count = sum(len(m.ports) for m in machines)
    if not public:
        return CheckResult(
            check="ports", is_fine=True, text=f"{count} of Ray, on loopback or private addresses only"
        )
    examples = ", ".join(
        f"{port.program} on {port.host}:{port.port} of {address}" for address, port in public[:3]
    )
    return CheckResult(
        check="ports",
        is_fine=False,
        text=f"{len(public)} of {count} listen on every address ({examples}): whoever reaches them may run programs. "
        f"Start Ray with --node-ip-address=<private address> and without a dashboard, or close them in the firewall",
    )


def _paths(machines: list[MachineFacts], token: str, path: Path) -> CheckResult:
    lacking = [m.address for m in machines if m.marker != token]
    if not lacking:
        return CheckResult(
            check="shared path", is_fine=True, text=f"{path} is the same folder on every machine"
        )
    return CheckResult(
        check="shared path",
        is_fine=False,
        text=f"{path} is not the same folder on {', '.join(lacking)}: models, data and the run folder must lie on a "
        f"file system that all machines mount; name it with --path",
    )


def _clocks(machines: list[MachineFacts], started: float, seconds: float) -> CheckResult:
    """Each answer was given between the start of the survey and its end, by whatever clock is right."""
    early, late = started - MAX_CLOCK_DIFFERENCE_S, started + seconds + MAX_CLOCK_DIFFERENCE_S
    deviating = [
        f"{m.address} ({m.clock - started:+.0f} s)" for m in machines if not early <= m.clock <= late
    ]
    return CheckResult(
        check="clocks",
        is_fine=not deviating,
        text="all agree"
        if not deviating
        else f"{', '.join(deviating)} differ: run a time daemon on all machines",
    )


def _shared_memory(machines: list[MachineFacts]) -> CheckResult:
    small = [m.address for m in machines if m.shared_memory_free_bytes < MIN_SHARED_MEMORY_BYTES]
    least = min(m.shared_memory_free_bytes for m in machines) / 2**30
    advice = f"; enlarge /dev/shm on {', '.join(small)} (containers: --shm-size)" if small else ""
    return CheckResult(
        check="shared memory", is_fine=not small, text=f"{least:.1f} GiB free at least{advice}"
    )


def _by_value(values: dict[str, str]) -> str:
    kinds = sorted(set(values.values()))
    return ", ".join(
        f"{kind or 'nothing'} on {' '.join(address for address, value in values.items() if value == kind)}"
        for kind in kinds
    )
