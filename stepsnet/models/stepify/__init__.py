"""Any residual model as a StepsNet of about the same compute.

convert.py has :func:`stepsnet.stepify`. example.py makes the example that the model is called with; containers.py
finds the blocks; plan.py chooses widths and depths; replace_blocks.py puts new blocks in steps (sequence.py), each made
from an old one that differences.py picks; in_design.py joins them by a design of the stream. of_transformers.py does
all of this for models of transformers. Each class of blocks is declared by a row of adapters_timm.py, from which
roles.py makes a block at another width, or by a function that a user registers (adapters.py).
"""

from .convert import OPTIONS, create, model_and_example, stages_in_steps, stepify

__all__ = ["OPTIONS", "create", "model_and_example", "stages_in_steps", "stepify"]
