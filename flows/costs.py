"""GPU hours and cost of a month, by project and owner, with the quotas of the projects.

    python -m flows.costs                              this month
    python -m flows.costs --month 2026-11 --project nlp

Runs count in the month of their start (UTC). Cached stages cost nothing. MLflow has the same figures for each run, in
the metrics cost/. docs/how-to/team.md explains quotas.
"""

from collections.abc import Sequence

from prefect.settings import get_current_settings

from contract import closed_pipe
from contract.amounts import dollars
from flows import arguments
from tasks.run import accounts
from tasks.run.places import open_run_store
from tasks.servers import prefect_server

HEAD = ("project", "owner", "runs", "GPU hours", "USD", "quota")


@arguments.reports_faults
def main(argv: Sequence[str] | None = None) -> int:
    options = arguments.costs().parse_args(argv)
    month = options.month or accounts.month_of()
    wanted = (options.project, options.owner)
    used = {
        whose: one
        for whose, one in sorted(accounts.usage(open_run_store(), month).items())
        if all(name in (None, own) for name, own in zip(wanted, whose, strict=True))
    }
    prefect_server.use_running()
    limits = accounts.quotas() if get_current_settings().api.url else {}
    rows = [HEAD, *((*whose, *_figures(one), _quota(limits.get(whose[0], {}))) for whose, one in used.items())]
    rows.append((f"all of {month}", "", *_figures(sum(used.values(), accounts.Usage())), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _figures(used: accounts.Usage) -> tuple[str, str, str]:
    return str(used.runs), f"{used.gpu_hours:.3g}", dollars(used.usd)


def _quota(limit: dict[str, float]) -> str:
    return ", ".join(f"{dollars(limit[key])} {name}" for key, name in accounts.UNITS.items() if key in limit)


if __name__ == "__main__":
    closed_pipe.run(main)
