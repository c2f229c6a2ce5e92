"""shardplan.search"""
