"""What every Antiphon process does alike: logs, traces, metrics pages, and how it ends.

Import the parts as modules: `logs`, `tracing`, `status`, `exit`, `options`. They know nothing of the rest of the house,
and none of them costs anything before it is configured.
"""

from antiphon_telemetry.exit import leave
from antiphon_telemetry.options import option
from antiphon_telemetry.status import StatusServer

__all__ = ["StatusServer", "leave", "option"]
