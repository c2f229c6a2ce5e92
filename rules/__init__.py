"""shardplan.rules"""
