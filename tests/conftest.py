import os

# Most tests are not about drafts, whose programs take longer to compile; those that are ask for some.
os.environ.setdefault("DEEPINFER_USE_NEXTN_DECODE", "0")
