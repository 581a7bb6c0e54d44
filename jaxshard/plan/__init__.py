"""Predicts each device's cost of a training step: memory, traffic and time, from its traced program."""

from jaxshard.hardware.chips import Chip as Chip
from jaxshard.hardware.chips import chip as chip
from jaxshard.hardware.chips import chip_of as chip_of
from jaxshard.layout.resharding import Resharding as Resharding
from jaxshard.layout.resharding import resharding as resharding
from jaxshard.plan.choices import Candidate as Candidate
from jaxshard.plan.choices import Target as Target
from jaxshard.plan.choices import candidates as candidates
from jaxshard.plan.choices import side_by_side as side_by_side
from jaxshard.plan.costs import Costs as Costs
from jaxshard.plan.costs import Seconds as Seconds
from jaxshard.plan.pages.drawing import draw as draw
from jaxshard.plan.prediction import KINDS as KINDS
from jaxshard.plan.prediction import Prediction as Prediction
from jaxshard.plan.prediction import Row as Row
from jaxshard.plan.prediction import predict as predict
from jaxshard.plan.program import Moved as Moved
from jaxshard.plan.search import AnyRows as AnyRows
from jaxshard.plan.search import Build as Build
from jaxshard.plan.search import Fit as Fit
from jaxshard.plan.search import at_rest as at_rest
from jaxshard.plan.search import building as building
from jaxshard.plan.search import compare as compare
from jaxshard.plan.search import fewest_devices as fewest_devices
from jaxshard.plan.search import fit as fit
from jaxshard.plan.search import largest_batch as largest_batch
