-- Acquires locks as plain.sql does, with the same parameters, but one at a time.
SELECT f.*, false AS open, false AS astray
  FROM {acquire}(($1::text[])[1], ($2::text[])[1], ($3::text[])[1], ($4::int8[])[1], ($5::int4[])[1], ($6::int8[])[1]) f
