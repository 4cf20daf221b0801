"""What every test starts from."""

import os

# Runs neither read nor leave profiles: what one measured would change what the next one decides.
os.environ["SLIPSTREAM_PROFILE"] = "off"
