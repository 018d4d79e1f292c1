"""Stand-in for an engine that hangs during its import."""

import time

time.sleep(3600)
