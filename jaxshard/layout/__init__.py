"""The sharding of each leaf of params, gradients and state: pure functions of shapes, dtypes, options and mesh. And
`reshard`, which moves arrays to other shardings.
"""

from jaxshard.layout.cutting import Leaf as Leaf
from jaxshard.layout.cutting import Place as Place
from jaxshard.layout.options import CommonOptions as CommonOptions
from jaxshard.layout.options import Config as Config
from jaxshard.layout.options import CutAxes as CutAxes
from jaxshard.layout.options import Cuts as Cuts
