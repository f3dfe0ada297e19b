-- Ends grants as release.sql does, with the same parameters, but one at a time.
SELECT f.* FROM {release}(($1::text[])[1], ($2::text[])[1], ($3::int8[])[1], ($4::int4[])[1], $5::bool) f
