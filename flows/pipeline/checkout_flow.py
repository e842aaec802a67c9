"""A flow that, when it is called from Python, uses the Prefect server of this checkout."""

from typing import Any

from prefect import Flow

from tasks.servers import prefect_server


class CheckoutFlow(Flow):
    def __call__(self, *args: Any, **parameters: Any) -> Any:
        prefect_server.use()
        return super().__call__(*args, **parameters)
