"""A target whose import never ends, as from a file system that does not answer."""

import time

while True:
    time.sleep(1.0)
