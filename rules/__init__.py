"""Rules: the index expression that an operation computes, and every split that follows from it."""

from shardplan.rules.analysis import Slot as Slot
from shardplan.rules.analysis import Split as Split
from shardplan.rules.coverage import coverage as coverage
from shardplan.rules.coverage import coverage_markdown as coverage_markdown
from shardplan.rules.coverage import coverage_records as coverage_records
from shardplan.rules.descriptions import describe as describe
from shardplan.rules.errors import RuleError as RuleError
from shardplan.rules.errors import ShardplanError as ShardplanError
from shardplan.rules.expression import Expression as Expression
from shardplan.rules.lambdas import And as And
from shardplan.rules.lambdas import Function as Function
from shardplan.rules.lambdas import Max as Max
from shardplan.rules.lambdas import Min as Min
from shardplan.rules.lambdas import Opaque as Opaque
from shardplan.rules.lambdas import Or as Or
from shardplan.rules.lambdas import Prod as Prod
from shardplan.rules.lambdas import Sum as Sum
from shardplan.rules.operations import rule_of as rule_of
from shardplan.rules.rule import Rule as Rule
from shardplan.rules.rule import derive as derive
from shardplan.rules.verify import Verdict as Verdict
from shardplan.rules.verify import verify as verify
from shardplan.rules.verify import verify_linear as verify_linear
from shardplan.rules.without_rule import is_without_rule as is_without_rule
