"""Model folders on disk -> parameters on devices. Names, shapes and formats are declared in `weights/layout.py`.

- hf: `load_params`. On its way folder finds the tensors, completeness checks that none lacks, safetensors reads them,
  host_formats decodes them, leaves puts them into their form on the device.
- init: `init_params`, random parameters without a file.
- tiny, tiny_config, tiny_tokenizer: write a small model folder for tests and trials.
"""
