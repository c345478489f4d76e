"""The command line, `deepinfer-jax`.

- main: the commands and their options. check: `check`. plan_report, compiled_memory: `plan`.
- environment_report: `env`.
"""
