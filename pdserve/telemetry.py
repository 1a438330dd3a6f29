"""How a process of ours logs: one line an event, on standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
import time


class TextFormatter(logging.Formatter):
    """`14:02:11.123 INFO    decode:50051 pdserve.engine: message`."""

    def __init__(self, source: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {source} %(name)s: %(message)s", "%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, source, logger, message, and exception where there is one."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "source": self._source,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: str, line_format: str, source: str) -> None:
    """Send every log line of this process to standard error.

    level: debug, info, warning or error. line_format: text or json. source: which node this is, such as decode:50051.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(source) if line_format == "json" else TextFormatter(source))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
